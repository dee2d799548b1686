"""Any reasoning-gym dataset as an environment, split by a hash of the problem's text.

The split looks at text alone: reasoning-gym derives an item from seed + index, so two far seeds can
produce the same problem, and only the text says so. A cryptographic hash is needed, because a
linear one holds out whole residue classes and nothing generalises to them.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from typing import Any, Literal

import reasoning_gym
from reasoning_gym.factory import DATASETS

from tasks.environments.protocol import ScorerError, Task, Verdict

UNRELIABLE = {
    "boxnet",
    "game_of_life_halting",
    "graph_color",
    "propositional_logic",
    "rubiks_cube",
    "rush_hour",
}
"""Datasets whose scorers reward wrong answers or refuse right ones."""

NUM_ITEMS = 2**31
"""Items of a dataset: item seeds are kept where every dataset accepts them."""

LAID_OUT = {"acre", "gsm_symbolic", "list_functions", "word_ladder"}
NUM_ITEMS_LAID_OUT = 20_000
"""Items of a dataset that lays all of them out in memory when it is made; word_ladder's bound."""

TRY_AGAIN = "That is not right. Try again."


def task_hash(text: str) -> str:
    """64 hex digits of BLAKE2b over the problem's text."""
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


class ReasoningGym:
    """One reasoning-gym dataset.

    `dataset_options` are the dataset's own. A share `heldout_share` of all problem texts is held
    out. With `max_turns` above 1, a wrong answer is followed by a request to try again.
    `reward` "exact" gives 1.0 to a full score and 0.0 to any other; "score" gives the dataset's
    score, which may hold partial credit.

    Raises `ValueError` naming the option and the fix.
    """

    def __init__(
        self,
        dataset: str = "",
        dataset_options: dict[str, Any] | None = None,
        heldout_share: float = 0.2,
        max_turns: int = 1,
        reward: Literal["exact", "score"] = "exact",
        **unknown: Any,
    ):
        where = "environment.options"
        if unknown:
            raise ValueError(
                f"{where}: unknown key {', '.join(unknown)}; use dataset, dataset_options, "
                "heldout_share, max_turns or reward."
            )
        if dataset in UNRELIABLE:
            raise ValueError(
                f"{where}.dataset: the scorer of {dataset} is not reliable, so rewards would be "
                f"wrong; use another dataset than {', '.join(sorted(UNRELIABLE))}."
            )
        if dataset not in DATASETS:
            raise ValueError(
                f"{where}.dataset: reasoning-gym has no dataset {dataset!r}; one of its "
                f"{len(DATASETS)} is basic_arithmetic."
            )
        if not 0 < heldout_share < 1:
            raise ValueError(f"{where}.heldout_share: {heldout_share} is not between 0 and 1.")
        if max_turns < 1:
            raise ValueError(f"{where}.max_turns: {max_turns} is below 1.")
        if reward not in ("exact", "score"):
            raise ValueError(f"{where}.reward: {reward!r} is neither exact nor score.")
        self.name = f"reasoning_gym/{dataset}"
        self._dataset = _make_dataset(dataset, dataset_options or {}, where)
        self._heldout_share = heldout_share
        self._max_turns = max_turns
        self._reward = reward

    def split_of(self, text: str) -> Literal["train", "heldout"]:
        """Which split a problem belongs to, by the first 64 bits of its hash."""
        position = int(task_hash(text)[:16], 16) / 2**64
        return "heldout" if position < self._heldout_share else "train"

    def sample(self, seed: int) -> Task:
        for task in self._walk(seed):
            if task.split == "train":
                return task
        raise AssertionError("the walk does not end")

    def heldout(self, num_tasks: int) -> list[Task]:
        found: dict[str, Task] = {}
        patience = 50 * num_tasks + 10_000
        for tried, task in enumerate(self._walk(0)):
            if len(found) == num_tasks:
                break
            if tried == patience:
                raise ValueError(
                    f"evaluation.num_tasks: {num_tasks} held-out problems were asked for, but "
                    f"{self.name} gave only {len(found)} distinct ones in {patience:,} tries; ask "
                    "for fewer, or widen the dataset's options."
                )
            if task.split == "heldout":
                found.setdefault(task.task_id, task)
        return list(found.values())

    def verify(self, task: Task, answer: str, turn_index: int) -> Verdict:
        try:
            score = self._dataset.score_answer(answer.strip(), task.payload)
        except Exception as error:
            # Scorers parse free text and raise anything; which answer broke one is worth knowing.
            raise ScorerError(task.task_id, f"{type(error).__name__}: {error}") from error
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise ScorerError(task.task_id, f"the score is {score!r}, not a finite number")
        exact = float(score >= 1.0)
        done = exact == 1.0 or turn_index + 1 >= self._max_turns
        return Verdict(
            reward=exact if self._reward == "exact" else float(score),
            components={"score": float(score), "exact": exact},
            done=done,
            observation=None if done else TRY_AGAIN,
        )

    def _walk(self, seed: int) -> Iterator[Task]:
        """Tasks at item seeds drawn from `seed`, well spread whatever the seeds are."""
        step = 0
        while True:
            digest = hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=8).digest()
            entry = self._dataset[int.from_bytes(digest) % len(self._dataset)]
            text = entry["question"]
            yield Task(
                task_id=task_hash(text)[:32],
                environment=self.name,
                split=self.split_of(text),
                messages=({"role": "user", "content": text},),
                payload=entry,
            )
            step += 1


def _make_dataset(name: str, options: dict[str, Any], where: str) -> Any:
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    if unknown := sorted(options.keys() - known):
        raise ValueError(
            f"{where}.dataset_options: {name} has no option {', '.join(unknown)}; it has "
            f"{', '.join(sorted(known))}."
        )
    size = NUM_ITEMS_LAID_OUT if name in LAID_OUT else NUM_ITEMS
    try:
        return reasoning_gym.create_dataset(name, seed=0, size=size, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{where}.dataset_options: {name} refuses them: {error}.") from None
