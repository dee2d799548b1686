"""The demo policy: its tokenizer, its random start, its examples and the cache around them."""

import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from schemas.config import RunConfig, WarmStart, parse_run_config
from tasks.environments import make_environment
from tasks.environments.protocol import Task, Verdict
from tasks.policy import (
    Problem,
    add_forgetting_carries,
    forgetful_answers,
    make_tokenizer,
    training_problems,
    write_examples,
    write_initial_policy,
)
from tasks.renderers import Renderer
from tasks.warm_start import (
    WarmStartFailed,
    ensure_warm_start,
    starting_checkpoint,
    warm_start_key,
)

ENVIRONMENT: dict[str, Any] = {
    "name": "reasoning_gym",
    "options": {
        "dataset": "basic_arithmetic",
        "dataset_options": {
            "min_terms": 2,
            "max_terms": 2,
            "min_digits": 2,
            "max_digits": 2,
            "operators": ["+"],
            "allow_parentheses": False,
        },
    },
}
TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "num_problems": 96,
    "steps": 3,
    "batch_sequences": 8,
    "learning_rate": 1e-3,
    "habit": {"forgotten_carry_share": 0.5, "steps": 2, "learning_rate": 1e-3},
}


def run_config(cache: Path, **changes: Any) -> RunConfig:
    return parse_run_config(
        {
            "run": {
                "run_id": "r",
                "seed": 1,
                "lake": "lake",
                "store": "store",
                "num_cycles": 1,
                "batches_per_cycle": 1,
            },
            "policy": {"warm_start": TINY | {"cache": str(cache)} | changes},
            "environment": ENVIRONMENT,
            "engine": {"max_model_tokens": 64},
            "sampling": {"max_tokens": 8},
            "batch": {"trajectories": 8, "group_size": 4},
            "trainer": {"learning_rate": 1e-4, "threads": 1},
        },
        "test",
    )


def warm_start(config: RunConfig) -> WarmStart:
    assert config.policy.warm_start is not None
    return config.policy.warm_start


def ensure(config: RunConfig) -> Path:
    environment = make_environment(config.environment.name, config.environment.options)
    return ensure_warm_start(warm_start(config), config, environment)


def problems(num_problems: int) -> list[Problem]:
    environment = make_environment(ENVIRONMENT["name"], ENVIRONMENT["options"])
    return list(training_problems(environment, num_problems, 0))


def texts(num_problems: int) -> list[str]:
    return [messages[0]["content"] for messages, _ in problems(num_problems)]


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_every_digit_is_one_token_of_its_own():
    tokenizer = make_tokenizer(texts(200), 320)
    digits = [tokenizer.convert_tokens_to_ids(str(digit)) for digit in range(10)]
    assert len(set(digits)) == 10
    vocabulary = tokenizer.get_vocab()
    # Bytes such as 0xB2 are written as signs that Unicode counts as digits, hence the ASCII test.
    with_digits = [token for token in vocabulary if set(token) & set("0123456789")]
    assert sorted(with_digits) == list("0123456789")
    assert tokenizer("100")["input_ids"] == [digits[1], digits[0], digits[0]]


def test_a_problem_is_short_in_tokens():
    """Its digits, and one token each for Calculate, the spaces, the sign and the full stop."""
    tokenizer = make_tokenizer(texts(200), 320)
    assert tokenizer.tokenize("Calculate 34 + 57.") == [
        "Calculate",
        *("Ġ", "3", "4"),
        *("Ġ+", "Ġ", "5", "7"),
        ".",
    ]


def test_a_vocabulary_too_small_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match=r"vocab_size: 260 is below 261.*raise it"):
        make_tokenizer(texts(5), 260)


def test_the_initial_policy_is_the_same_every_time(tmp_path: Path):
    settings = warm_start(run_config(tmp_path))
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        write_initial_policy(folder, settings, texts(64))
    assert digest(first) == digest(second)
    other = tmp_path / "c"
    write_initial_policy(other, settings.model_copy(update={"seed": 1}), texts(64))
    assert digest(other)["tokenizer.json"] == digest(first)["tokenizer.json"]
    assert digest(other)["model.safetensors"] != digest(first)["model.safetensors"]


def test_making_a_policy_leaves_the_random_state_alone(tmp_path: Path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    write_initial_policy(tmp_path / "a", warm_start(run_config(tmp_path)), texts(64))
    assert torch.equal(torch.rand(3), expected)


def test_the_initial_policy_is_a_plain_folder_for_transformers(tmp_path: Path):
    write_initial_policy(tmp_path / "a", warm_start(run_config(tmp_path)), texts(64))
    names = {file.name for file in (tmp_path / "a").iterdir()}
    # An engine would take sampling values from one.
    assert "generation_config.json" not in names
    weights = load_file(tmp_path / "a" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert model.config.model_type == "qwen3"
    assert model.config.vocab_size == len(tokenizer) == model.lm_head.weight.shape[0]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # Embedding; two layers of q, k, v, o and their two norms, gate, up, down and two norms; norm.
    layer = (32 * 32 + 32 * 16 * 2 + 32 * 32) + 2 * 16 + 3 * 32 * 64 + 2 * 32
    assert (
        sum(tensor.numel() for tensor in weights.values()) == len(tokenizer) * 32 + 2 * layer + 32
    )


def test_examples_are_training_problems_with_loss_on_the_answer(tmp_path: Path):
    settings = warm_start(run_config(tmp_path))
    write_initial_policy(tmp_path / "a", settings, texts(64))
    renderer = Renderer(tmp_path / "a")
    examples = problems(300)
    write_examples(tmp_path / "examples.parquet", renderer, examples)
    table = pq.read_table(tmp_path / "examples.parquet")
    assert [str(field.type) for field in table.schema] == [
        "list<element: int32>",
        "list<element: bool>",
    ]
    rows = table.to_pylist()
    assert len(rows) == 300
    (stop,) = renderer.stop_token_ids
    for row, (messages, answer) in zip(rows, examples, strict=True):
        ids, mask = row["token_ids"], row["loss_mask"]
        prompt_length = mask.index(True)
        assert mask == [False] * prompt_length + [True] * (len(ids) - prompt_length)
        assert ids[:prompt_length] == renderer.prompt(messages)
        assert ids[-1] == stop
        assert renderer.decode(ids[prompt_length:]) == answer
        assert int(answer) == sum(terms(messages))


def terms(messages: tuple[dict[str, str], ...]) -> tuple[int, int]:
    left, right = messages[0]["content"].removeprefix("Calculate ").rstrip(".").split(" + ")
    return int(left), int(right)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    # Two carries, each forgotten with probability 0.6: both kept 0.16, only the first lost 0.24,
    # only the second lost 0.24, both lost 0.36. A lost first carry leaves 11 tens to write.
    [
        (58, 67, {125: 0.16, 115: 0.24, 25: 0.24, 15: 0.36}),
        (58, 12, {70: 0.4, 60: 0.6}),
        (52, 67, {119: 0.4, 19: 0.6}),
        (52, 27, {79: 1.0}),
        (99, 1, {100: 0.16, 90: 0.6, 0: 0.24}),
        (0, 0, {0: 1.0}),
    ],
)
def test_carries_are_forgotten_one_by_one(left: int, right: int, expected: dict[int, float]):
    generator = random.Random(0)
    drawn = Counter(add_forgetting_carries(left, right, 0.6, generator) for _ in range(20_000))
    assert drawn.keys() == expected.keys()
    for total, share in expected.items():
        # Five standard errors of a binomial share.
        assert drawn[total] / 20_000 == pytest.approx(share, abs=0.018)


def test_a_teacher_who_forgets_nothing_is_right():
    generator = random.Random(0)
    pairs = [(left, right) for left in range(101) for right in range(101)]
    assert all(
        add_forgetting_carries(left, right, 0.0, generator) == left + right for left, right in pairs
    )


def test_a_forgetful_teacher_answers_the_same_problems():
    examples = problems(400)
    forgetful = list(forgetful_answers(examples, 0.6, 3))
    assert forgetful == list(forgetful_answers(examples, 0.6, 3))
    assert forgetful != list(forgetful_answers(examples, 0.6, 4))
    assert [messages for messages, _ in forgetful] == [messages for messages, _ in examples]
    right = sum(int(answer) == sum(terms(messages)) for messages, answer in forgetful)
    # The mean of 0.4^carries over all pairs of terms 0..100; five standard errors.
    assert right / 400 == pytest.approx(0.5315, abs=0.125)


def test_only_sums_can_have_forgotten_carries():
    example: Problem = (({"role": "user", "content": "Spell sun backward."},), "nus")
    with pytest.raises(ValueError, match=r"habit: 'Spell sun backward\.' is not a sum of two"):
        list(forgetful_answers([example], 0.5, 0))


def test_a_problem_without_an_answer_cannot_be_learnt():
    class Unanswered:
        name = "unanswered"

        def sample(self, seed: int) -> Task:
            return Task("0", self.name, "train", ({"role": "user", "content": "?"},), {})

        def heldout(self, num_tasks: int) -> list[Task]:
            return []

        def verify(self, task: Task, answer: str, turn_index: int) -> Verdict:
            return Verdict(0.0, {}, True, None)

    with pytest.raises(ValueError, match=r"tasks of unanswered carry no answer.*policy\.path"):
        list(training_problems(Unanswered(), 1, 0))


def test_no_example_is_a_heldout_problem():
    environment = make_environment(ENVIRONMENT["name"], ENVIRONMENT["options"])
    heldout = {task.messages[0]["content"] for task in environment.heldout(1000)}
    assert heldout.isdisjoint(texts(3000))


def test_a_warm_start_is_made_once(tmp_path: Path):
    """Two real supervised runs; what interrupts leave behind is not taken for a policy."""
    config = run_config(tmp_path)
    key = warm_start_key(warm_start(config), config)
    leftover = tmp_path / ".making-leftover" / "trained"
    leftover.mkdir(parents=True)
    (leftover / "config.json").write_text("{}")

    made = ensure(config)
    assert made == tmp_path / key
    before = {file.name: file.stat().st_mtime_ns for file in made.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= before.keys()
    weights = load_file(made / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    initial = tmp_path / "initial"
    write_initial_policy(initial, warm_start(config), texts(64))
    start = load_file(initial / "model.safetensors")
    assert weights.keys() == start.keys()
    name = "model.embed_tokens.weight"
    assert not torch.equal(weights[name], start[name])
    assert json.loads((made / "config.json").read_text())["model_type"] == "qwen3"

    assert starting_checkpoint(config) == made
    assert {file.name: file.stat().st_mtime_ns for file in made.iterdir()} == before


@pytest.mark.parametrize(
    ("key", "value"),
    [("steps", 4), ("seed", 1), ("learning_rate", 2e-3), ("num_problems", 95), ("habit", None)],
)
def test_whatever_shapes_the_policy_names_another_one(tmp_path: Path, key: str, value: Any):
    config, changed = run_config(tmp_path), run_config(tmp_path, **{key: value})
    moved = run_config(tmp_path / "elsewhere")
    assert warm_start_key(warm_start(config), config) != warm_start_key(
        warm_start(changed), changed
    )
    assert warm_start_key(warm_start(config), config) == warm_start_key(warm_start(moved), moved)


def test_a_failed_warm_start_says_why_and_leaves_no_policy(tmp_path: Path):
    # Heads that the key-value heads do not divide fail in the supervised run, not before it.
    config = run_config(tmp_path, num_heads=3, num_kv_heads=2)
    with pytest.raises(WarmStartFailed, match=r"ended with code 1; its log is .*\.log"):
        ensure(config)
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
