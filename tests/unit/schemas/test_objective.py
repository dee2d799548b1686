"""Options of [trainer] that contradict each other are refused with the reason and the fix."""

import itertools
from typing import Any, get_args

import pytest

from schemas.config import changed_keys, parse_recorded_config, parse_run_config
from schemas.objective import CAPPED, MASK_LIMITS, RECIPES
from schemas.trainer_section import TrainerSection
from tests.run_files import MINIMAL, message


def with_trainer(**options: Any) -> dict[str, Any]:
    return MINIMAL | {"trainer": MINIMAL["trainer"] | options}


def trainer(**options: Any) -> TrainerSection:
    return parse_run_config(with_trainer(**options), "r.toml").trainer


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            {"loss": "reinforce", "clip_low": 0.2},
            ['clip_low has no effect with loss = "reinforce"', "clips no ratio", "remove it"],
        ),
        (
            {"loss": "reinforce", "clip_high": 0.2},
            ['clip_high has no effect with loss = "reinforce"', "remove it"],
        ),
        (
            {"loss": "dapo", "clip_high": 0.2},
            ['loss = "dapo"', "clip_high = 0.2 is not above clip_low = 0.2", '"ppo_clip"'],
        ),
        (
            {"loss": "dapo", "reduction": "sequence"},
            ['loss = "dapo"', 'reduction = "sequence"', '"token" or "group"', '"ppo_clip"'],
        ),
        (
            {"loss": "dr_grpo", "reduction": "token"},
            ['loss = "dr_grpo"', '"constant"', '"ppo_clip"'],
        ),
        (
            {"loss": "dr_grpo", "advantage": "group_mean_std"},
            ['loss = "dr_grpo"', '"group_mean"', '"ppo_clip"'],
        ),
        (
            {"loss": "gspo", "reduction": "token"},
            ['loss = "gspo"', '"sequence"', "one ratio a sequence"],
        ),
        (
            {"loss": "gspo", "correction": "token_tis"},
            ['correction = "token_tis"', 'loss = "gspo"', '"sequence_tis"'],
        ),
        (
            {"loss": "gspo", "mask": "token"},
            ['mask = "token"', 'loss = "gspo"', '"geometric"'],
        ),
        (
            {"correction": "sequence_is", "mask": "token"},
            ['mask = "token"', 'correction = "sequence_is"', '"sequence"'],
        ),
        (
            {"correction": "token_is", "w_cap": 3.0},
            ['w_cap has no effect with correction = "token_is"', '"token_tis"'],
        ),
        (
            {"correction": "none", "w_cap": 3.0},
            ['w_cap has no effect with correction = "none"', "remove it"],
        ),
        ({"w_cap": 0.5}, ["w_cap = 0.5 is below 1", "give at least 1"]),
        ({"mask_low": 0.5}, ["mask_low has no effect without a mask", 'mask = "token"']),
        ({"mask_high": 2.0}, ["mask_high has no effect without a mask"]),
        (
            {"mask": "sequence", "mask_low": 3.0, "mask_high": 2.0},
            ["mask_low = 3.0", "mask_high = 2.0", "mask_low < 1 < mask_high"],
        ),
        (
            {"mask": "geometric", "mask_low": 1.5, "mask_high": 2.0},
            ["mask_low < 1 < mask_high", "engine and trainer agree"],
        ),
        (
            {"mask": "token", "w_cap": 4.0, "mask_high": 3.0},
            ["w_cap = 4.0 never binds", "mask_high = 3.0", '"token_is"'],
        ),
        (
            {"correction": "sequence_tis", "mask": "sequence", "mask_high": 2.0},
            ["w_cap = 2.0 never binds", "mask_high = 2.0", '"sequence_is"'],
        ),
        ({"kl_coefficient": 0.1}, ["kl_coefficient", "reference_version = 0"]),
        ({"reference_version": 0}, ["reference_version has no effect", "kl_coefficient"]),
        ({"kl_estimator": "k3"}, ["kl_estimator has no effect", "kl_coefficient"]),
        ({"kl_coefficient": -0.1, "reference_version": 0}, ["trainer.kl_coefficient", "-0.1"]),
        ({"entropy_coefficient": -0.1}, ["trainer.entropy_coefficient", "-0.1"]),
        ({"warmup_steps": -1}, ["trainer.warmup_steps", "-1"]),
        (
            {"decay_steps": 100},
            ['decay_steps has no effect with learning_rate_schedule = "constant"', '"cosine"'],
        ),
        (
            {"min_learning_rate": 1e-5},
            ["min_learning_rate has no effect", "remove it", '"linear"'],
        ),
        (
            {"learning_rate_schedule": "cosine"},
            ['learning_rate_schedule = "cosine" has no end', "give decay_steps"],
        ),
        (
            {"learning_rate_schedule": "linear", "decay_steps": 99, "min_learning_rate": 1e-4},
            ["min_learning_rate = 0.0001 is not below learning_rate = 0.0001", '"constant"'],
        ),
    ],
)
def test_options_without_sense_are_refused(options: dict[str, Any], parts: list[str]):
    text = message(with_trainer(**options))
    assert text.startswith("r.toml: trainer")
    assert len(text.splitlines()) == 1
    for part in parts:
        assert part in text


def test_a_group_reduction_needs_whole_groups_in_a_minibatch():
    # 32 trajectories in 16 minibatches: two of them each, and groups of four.
    data = with_trainer(reduction="group")
    assert parse_run_config(data, "r.toml").trainer.reduction == "group"
    data["batch"] = MINIMAL["batch"] | {"minibatches": 16}
    text = message(data)
    assert "minibatches of 2 trajectories cut groups of 4" in text
    assert "batch.minibatches" in text


def test_steps_whose_rate_would_be_zero_are_refused():
    # 2 cycles of 3 batches of 2 minibatches: 12 optimizer steps.
    options = {"learning_rate_schedule": "linear", "warmup_steps": 2, "decay_steps": 10}
    assert trainer(**options).min_learning_rate == 0.0
    options["decay_steps"] = 9
    text = message(with_trainer(**options))
    assert "the learning rate is 0 from optimizer step 12 on, and the run takes 12" in text
    assert "a min_learning_rate above 0, or lower run.num_cycles" in text
    assert trainer(**options, min_learning_rate=1e-6).decay_steps == 9


def test_what_is_not_given_follows_the_loss():
    plain = trainer()
    assert (plain.loss, plain.advantage, plain.reduction) == ("ppo_clip", "group_mean_std", "token")
    assert (plain.clip_low, plain.clip_high) == (0.2, 0.2)
    assert (plain.correction, plain.w_cap, plain.mask) == ("token_tis", 2.0, "none")
    assert (plain.mask_low, plain.kl_estimator, plain.reference_version) == (None, None, None)
    assert (plain.kl_coefficient, plain.entropy_coefficient) == (0.0, 0.0)
    reinforce = trainer(loss="reinforce", correction="none")
    assert (reinforce.clip_low, reinforce.clip_high, reinforce.w_cap) == (None, None, None)
    assert (trainer(loss="dapo").clip_low, trainer(loss="dapo").clip_high) == (0.2, 0.28)
    dr_grpo = trainer(loss="dr_grpo")
    assert (dr_grpo.advantage, dr_grpo.reduction) == ("group_mean", "constant")
    gspo = trainer(loss="gspo")
    assert (gspo.reduction, gspo.correction, gspo.w_cap) == ("sequence", "sequence_tis", 2.0)
    assert (gspo.clip_low, gspo.clip_high) == (3e-4, 4e-4)
    assert (trainer(loss="cispo").clip_low, trainer(loss="cispo").clip_high) == (1.0, 4.0)
    masked = trainer(correction="token_is", mask="geometric")
    assert (masked.mask_low, masked.mask_high) == (0.999, 1.001)
    assert trainer(kl_coefficient=0.1, reference_version=0).kl_estimator == "k3"


def test_the_tables_name_what_the_keys_take():
    fields = TrainerSection.model_fields
    assert set(get_args(fields["loss"].annotation)) == set(RECIPES)
    assert set(get_args(fields["mask"].annotation)) == {"none", *MASK_LIMITS}
    assert set(get_args(fields["correction"].annotation)) > set(CAPPED)
    reductions = set(get_args(fields["reduction"].annotation))
    advantages = set(get_args(fields["advantage"].annotation))
    for recipe in RECIPES.values():
        assert reductions >= set(recipe.reductions) and advantages >= set(recipe.advantages)


def test_every_accepted_combination_survives_the_ledger():
    accepted = 0
    fields = TrainerSection.model_fields
    names = ("loss", "reduction", "correction", "mask")
    for values in itertools.product(*(get_args(fields[name].annotation) for name in names)):
        try:
            config = parse_run_config(
                with_trainer(**dict(zip(names, values, strict=True))), "r.toml"
            )
        except ValueError:
            continue
        accepted += 1
        again = parse_recorded_config(config.model_dump(mode="json"), "the ledger")
        assert changed_keys(config, again) == []
    assert accepted > 100


def test_a_run_begun_without_routing_replay_goes_on_without():
    recorded = parse_run_config(MINIMAL, "r.toml").model_dump(mode="json")
    del recorded["trainer"]["routing_replay"]
    begun = parse_recorded_config(recorded, "the ledger")
    assert not begun.trainer.routing_replay
    same = parse_run_config(MINIMAL, "r.toml")
    assert same.trainer.routing_replay and changed_keys(begun, same) == []
    asked = parse_run_config(with_trainer(routing_replay=True), "r.toml")
    assert changed_keys(begun, asked) == ["trainer.routing_replay (False -> True)"]


def test_a_run_begun_when_idle_options_were_written_down_goes_on():
    recorded = parse_run_config(MINIMAL, "r.toml").model_dump(mode="json")
    for key in ("mask", "mask_low", "mask_high", "reduction"):
        del recorded["trainer"][key]
    recorded["trainer"] |= {"loss": "reinforce", "correction": "token_is"}
    recorded["trainer"] |= {"clip_low": 0.2, "clip_high": 0.2, "w_cap": 2.0}
    begun = parse_recorded_config(recorded, "the ledger")
    same = parse_run_config(with_trainer(loss="reinforce", correction="token_is"), "r.toml")
    assert changed_keys(begun, same) == []
