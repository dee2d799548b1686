"""Every bad run file gets one sentence that names the file, the key and the fix."""

from pathlib import Path
from typing import Any

import pytest

from flows.run_file import load_run_file
from schemas.config import RunConfig, changed_keys, parse_run_config
from tests.run_files import MINIMAL, message, with_


def test_a_minimal_file_is_synchronous_and_untruncated():
    config = parse_run_config(MINIMAL, "r.toml")
    assert config.asynchrony.k == 0 and config.asynchrony.lag_bound == 0
    assert not config.sampling.truncates
    assert config.batch.num_groups == 8


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        ("trainer.learning_rat", 1.0, ["unknown key trainer.learning_rat", "learning_rate"]),
        ("sampling.topk", 5, ["unknown key sampling.topk", "top_k"]),
        ("unknown.key", 5, ["unknown key unknown", "trainer"]),
        ("trainer.learning_rate", 0, ["trainer.learning_rate", "greater than 0", "0"]),
        ("trainer.learning_rate", "fast", ["trainer.learning_rate", "'fast'"]),
        ("trainer.loss", "gspo2", ["trainer.loss", "ppo_clip", "'gspo2'"]),
        ("batch.trajectories", 30, ["batch", "not a multiple of group_size = 4"]),
        ("batch.minibatches", 5, ["batch", "not a multiple of minibatches = 5"]),
        ("batch.group_size", 1, ["batch.group_size", "greater than or equal to 2"]),
        ("sampling.temperature", 0, ["sampling.temperature", "greater than 0"]),
        ("sampling.top_p", 0.9, ["top_p", "sampling.allow_truncation = true"]),
        ("sampling.top_k", 5, ["top_k", "sampling.allow_truncation = true"]),
        ("sampling.min_p", 0.1, ["min_p", "sampling.allow_truncation = true"]),
        ("trainer.compute_dtype", "float16", ["logprob_tolerance = 0.002", "0.02 for float16"]),
        ("engine.compute_dtype", "bfloat16", ["rounding of bfloat16", "0.1 for bfloat16"]),
        ("sampling.max_tokens", 64, ["leaves no room for a prompt"]),
        ("run.run_id", "../x", ["run.run_id", "pattern"]),
        ("run.seed", -1, ["run.seed"]),
        ("policy.warm_start", {}, ["policy.warm_start.steps is missing; add it"]),
        ("policy.path", None, ["policy", "either path", "warm_start"]),
        ("gates", {"reward_max": float("nan")}, ["gates.reward_max", "finite number"]),
        ("gates", {"reward_min": 2.0}, ["gates", "not below reward_max"]),
        ("engine.backend", "sglang", ["engine.backend", "'torch'"]),
    ],
)
def test_a_bad_value_is_named_with_its_fix(path: str, value: Any, parts: list[str]):
    text = message(with_(path, value))
    assert text.startswith("r.toml: ")
    for part in parts:
        assert part in text


def test_16_bits_are_taken_with_a_tolerance_for_them():
    data = with_("engine.logprob_tolerance", 0.02)
    data["trainer"] = {**data["trainer"], "compute_dtype": "float16"}
    assert parse_run_config(data, "r.toml").trainer.compute_dtype == "float16"


def test_truncation_is_taken_from_someone_who_means_it():
    data = with_("sampling.allow_truncation", True)
    assert not parse_run_config(data, "r.toml").sampling.truncates
    data["sampling"]["top_p"] = 0.9
    assert parse_run_config(data, "r.toml").sampling.truncates


def test_max_lag_below_k_is_refused_where_it_would_starve():
    data = with_("asynchrony", {"k": 2, "max_lag": 1, "order": "start"})
    assert "raise max_lag" in message(data)


def test_stale_tokens_without_an_audit_are_refused():
    data = with_("asynchrony", {"k": 1})
    data["trainer"]["audit_fraction"] = 0
    assert "give a share above 0" in message(data)


def test_every_fault_gets_its_own_sentence():
    data = with_("trainer.learning_rate", -1)
    data["batch"]["nope"] = 1
    assert len(message(data).splitlines()) == 2


def test_only_limits_threads_and_urls_may_change_on_resume():
    old = parse_run_config(MINIMAL, "r.toml")
    threads = parse_run_config(with_("trainer.threads", 7), "r.toml")
    longer = parse_run_config(with_("run.num_cycles", 9), "r.toml")
    assert changed_keys(old, threads) == [] and changed_keys(old, longer) == []
    faster = parse_run_config(with_("trainer.learning_rate", 0.5), "r.toml")
    assert changed_keys(old, faster) == ["trainer.learning_rate (0.0001 -> 0.5)"]
    optioned = parse_run_config(with_("environment.options", {"a": 1}), "r.toml")
    assert changed_keys(old, optioned) == ["environment.options ({} -> {'a': 1})"]


def test_a_configuration_survives_the_ledger():
    config = parse_run_config(MINIMAL, "r.toml")
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_files_and_overrides(tmp_path: Path):
    file = tmp_path / "r.toml"
    text = Path("infra/runs/demo.toml").read_text()
    file.write_text(text)
    config = load_run_file(file, ["run.seed=11", "run.lake=elsewhere"])
    assert config.run.seed == 11 and config.run.lake == "elsewhere"
    with pytest.raises(ValueError, match=r"write section\.key=value"):
        load_run_file(file, ["run.seed"])
    with pytest.raises(ValueError, match=r"unknown key run\.sede"):
        load_run_file(file, ["run.sede=1"])
    with pytest.raises(ValueError, match=r"no such file; infra/runs/demo\.toml"):
        load_run_file(tmp_path / "absent.toml")
    file.write_text("run = [")
    with pytest.raises(ValueError, match="not valid TOML"):
        load_run_file(file)
    with pytest.raises(ValueError, match="cannot be read as text"):
        load_run_file(tmp_path)


@pytest.mark.parametrize("file", sorted(Path("infra/runs").glob("*.toml")), ids=lambda p: p.name)
def test_committed_run_files_are_valid(file: Path):
    assert load_run_file(file).run.run_id
