"""reasoning-gym as an environment: the split, the walk, the verdicts, the refusals."""

import hashlib
from collections import Counter
from typing import Any

import pytest

from tasks.environments import ScorerError, make_environment
from tasks.environments.protocol import Task
from tasks.environments.reasoning_gym import UNRELIABLE, ReasoningGym, task_hash
from tasks.seeds import derive_seed

SUMS: dict[str, Any] = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 2,
    "max_digits": 2,
    "operators": ["+"],
    "allow_parentheses": False,
}


def sums(**options: Any) -> ReasoningGym:
    return ReasoningGym(dataset="basic_arithmetic", dataset_options=SUMS, **options)


def text_of(task: Task) -> str:
    (message,) = task.messages
    assert message["role"] == "user"
    return message["content"]


def terms_of(text: str) -> tuple[int, int]:
    left, right = text.removeprefix("Calculate ").removesuffix(".").split(" + ")
    return int(left), int(right)


def test_no_training_problem_is_held_out():
    environment = sums()
    train = {text_of(environment.sample(derive_seed(3, "task", i))) for i in range(4000)}
    heldout = {text_of(task) for task in environment.heldout(1500)}
    assert len(heldout) == 1500
    assert len(train) > 2500
    assert train.isdisjoint(heldout)


def test_the_split_is_the_hash_of_the_text():
    environment = sums(heldout_share=0.2)
    texts = [f"Calculate {a} + {b}." for a in range(40) for b in range(40)]
    for text in texts:
        digest = hashlib.blake2b(text.encode(), digest_size=32).digest()
        expected = "heldout" if int.from_bytes(digest[:8]) / 2**64 < 0.2 else "train"
        assert environment.split_of(text) == expected
    for task in (environment.sample(0), *environment.heldout(5)):
        assert task_hash(text_of(task)).startswith(task.task_id)
        assert task.split == environment.split_of(text_of(task))


@pytest.mark.parametrize("modulus", [2, 5, 10])
@pytest.mark.parametrize("term", [0, 1])
def test_no_residue_class_is_held_out_whole(modulus: int, term: int):
    """Pearson's chi-square of the held-out share over the residues of either term."""
    environment = sums()
    heldout, total = Counter[int](), Counter[int]()
    for a in range(100):
        for b in range(100):
            residue = (a, b)[term] % modulus
            total[residue] += 1
            heldout[residue] += environment.split_of(f"Calculate {a} + {b}.") == "heldout"
    share = sum(heldout.values()) / 10_000
    assert share == pytest.approx(0.2, abs=0.02)  # five standard errors of a binomial
    chi_square = sum(
        (heldout[r] - share * total[r]) ** 2 / (share * (1 - share) * total[r]) for r in total
    )
    # The 0.9999 quantile at 1, 4 and 9 degrees of freedom.
    assert chi_square < {2: 15.14, 5: 23.51, 10: 33.72}[modulus]


def test_tasks_depend_on_the_seed_alone():
    first, second = sums(), sums()
    seeds = [derive_seed(7, "task", i) for i in range(200)]
    assert [first.sample(seed) for seed in seeds] == [
        second.sample(seed) for seed in reversed(seeds)
    ][::-1]
    assert first.sample(2**63 - 1).split == "train"


def test_neighbouring_seeds_share_no_walk():
    environment = sums()
    texts = [text_of(environment.sample(seed)) for seed in range(500)]
    # 500 draws with replacement from about 8,130 give 485 distinct ones, give or take 4.
    assert len(set(texts)) > 465


def test_heldout_is_one_list_and_its_prefixes():
    environment = sums()
    long = environment.heldout(300)
    assert sums().heldout(100) == long[:100]
    assert len({task.task_id for task in long}) == 300


def test_terms_cover_the_whole_range():
    environment = sums()
    terms = [terms_of(text_of(environment.sample(seed))) for seed in range(3000)]
    values = [value for pair in terms for value in pair]
    assert (min(values), max(values)) == (0, 100)
    assert sum(values) / len(values) == pytest.approx(50.0, abs=2.0)


@pytest.mark.parametrize("dataset", ["gsm_symbolic", "list_functions", "word_ladder"])
def test_a_dataset_that_lays_out_its_items_is_kept_small(dataset: str):
    environment = ReasoningGym(dataset=dataset)
    task = environment.sample(1)
    assert environment.verify(task, task.payload["answer"], 0).reward == 1.0


def test_too_few_heldout_problems_are_an_error():
    environment = ReasoningGym(
        dataset="basic_arithmetic", dataset_options=SUMS | {"min_digits": 1, "max_digits": 1}
    )
    with pytest.raises(ValueError, match=r"evaluation\.num_tasks: 121 .*ask for fewer"):
        environment.heldout(121)


@pytest.mark.parametrize(
    ("answer", "score", "exact"),
    # A longer text that holds the answer earns its share of the characters.
    [("{}", 1.0, 1.0), (" {}\n", 1.0, 1.0), ("{} or 0", None, 0.0), ("no", 0.0, 0.0), ("", 0, 0)],
)
def test_reward_is_exact_unless_the_score_is_asked_for(answer: str, score: float, exact: float):
    environment = sums()
    task = environment.sample(1)
    right = str(sum(terms_of(text_of(task))))
    if score is None:
        score = len(right) / len(f"{right} or 0")
    verdict = environment.verify(task, answer.format(right), 0)
    assert verdict.reward == exact
    assert verdict.components == {"score": pytest.approx(score), "exact": exact}
    assert verdict.done and verdict.observation is None
    scored = sums(reward="score").verify(task, answer.format(right), 0)
    assert scored.reward == pytest.approx(score)


def test_a_wrong_answer_before_the_last_turn_is_asked_again():
    environment = sums(max_turns=2)
    task = environment.sample(1)
    right = str(sum(terms_of(text_of(task))))
    first = environment.verify(task, "no", 0)
    assert not first.done and first.reward == 0.0
    assert first.observation and right not in first.observation
    assert environment.verify(task, "no", 1).done
    early = environment.verify(task, right, 0)
    assert early.done and early.reward == 1.0


def test_a_scorer_that_raises_is_no_reward_of_zero():
    environment = ReasoningGym(dataset="prime_factorization")
    task = environment.sample(5)
    assert environment.verify(task, task.payload["answer"], 0).reward == 1.0
    with pytest.raises(ScorerError, match=rf"task {task.task_id}: ValueError") as caught:
        environment.verify(task, "two times three", 0)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("score", [None, float("nan"), float("inf"), "1.0"])
def test_a_score_that_is_no_finite_number_is_refused(score: Any, monkeypatch: pytest.MonkeyPatch):
    environment = sums()
    monkeypatch.setattr(environment._dataset, "score_answer", lambda answer, entry: score)
    with pytest.raises(ScorerError, match="not a finite number"):
        environment.verify(environment.sample(0), "1", 0)


@pytest.mark.parametrize("dataset", sorted(UNRELIABLE))
def test_datasets_with_unreliable_scorers_are_refused(dataset: str):
    with pytest.raises(ValueError, match=f"the scorer of {dataset} is not reliable"):
        make_environment("reasoning_gym", {"dataset": dataset})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chess", {}, r"environment\.name: no environment 'chess'; use reasoning_gym"),
        ("reasoning_gym", {}, r"environment\.options\.dataset: .*no dataset ''"),
        ("reasoning_gym", {"dataset": "sums"}, r"no dataset 'sums'.*basic_arithmetic"),
        (
            "reasoning_gym",
            {"dataset": "chain_sum", "turns": 2},
            r"environment\.options: unknown key turns; use dataset",
        ),
        (
            "reasoning_gym",
            {"dataset": "chain_sum", "dataset_options": {"terms": 2}},
            r"dataset_options: chain_sum has no option terms; it has .*max_terms",
        ),
        (
            "reasoning_gym",
            {"dataset": "chain_sum", "dataset_options": {"seed": 2}},
            r"chain_sum has no option seed",
        ),
        (
            "reasoning_gym",
            {"dataset": "chain_sum", "dataset_options": {"min_terms": 9}},
            r"chain_sum refuses them: max_terms must be >= min_terms",
        ),
        ("reasoning_gym", {"dataset": "chain_sum", "heldout_share": 1.0}, "heldout_share: 1.0"),
        ("reasoning_gym", {"dataset": "chain_sum", "max_turns": 0}, "max_turns: 0 is below 1"),
        ("reasoning_gym", {"dataset": "chain_sum", "reward": "f1"}, "reward: 'f1' is neither"),
    ],
)
def test_bad_options_are_named(name: str, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make_environment(name, options)
