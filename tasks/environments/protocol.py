"""What an environment is: tasks by seed, and a verdict on an answer.

An environment never sees tokens. It hands out messages and judges text, so that tokens stay
with the engine and the renderer, where they are recorded as sampled.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class Task:
    """One problem. `task_id` is a hash of its text; `payload` is what `verify` needs."""

    task_id: str
    environment: str
    split: Literal["train", "heldout"]
    messages: tuple[dict[str, str], ...]
    payload: Any


@dataclass(frozen=True)
class Verdict:
    """What an answer earned. Unless `done`, `observation` is the message the policy sees next.

    `reward` is the rollout's return if it ends here.
    """

    reward: float
    components: dict[str, float]
    done: bool
    observation: str | None


class ScorerError(Exception):
    """The scorer raised or returned no finite score: the rollout failed, it did not earn 0."""

    def __init__(self, task_id: str, cause: str):
        super().__init__(f"task {task_id}: {cause}")


class Environment(Protocol):
    """Pure and deterministic: the same seed or count gives the same tasks, on any machine."""

    name: str

    def sample(self, seed: int) -> Task:
        """A train task; `seed` in [0, 2^63)."""
        ...

    def heldout(self, num_tasks: int) -> list[Task]:
        """The first `num_tasks` distinct held-out tasks.

        Raises `ValueError` if there are fewer.
        """
        ...

    def verify(self, task: Task, answer: str, turn_index: int) -> Verdict:
        """Judges the answer of a turn, counted from 0. Raises `ScorerError`."""
        ...
