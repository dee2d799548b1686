"""What a planted fault is: a real corruption, and the rule that must name it."""

from collections.abc import Callable
from dataclasses import dataclass

from tasks.rollout import Rollout
from tests.faults.spoilable import Spoilable

Plant = Callable[[Spoilable], set[str] | None]


@dataclass(frozen=True)
class Fault:
    """`plant` spoils a batch and returns the ids that the rule must name, and no other; None where
    the fault has no rollouts of its own."""

    name: str
    gate: int
    rule: str
    severity: str
    plant: Plant


class Faults(list[Fault]):
    def of(self, gate: int, rule: str, severity: str) -> Callable[[Plant], Plant]:
        def add(plant: Plant) -> Plant:
            self.append(Fault(plant.__name__, gate, rule, severity, plant))
            return plant

        return add

    def in_one(self, gate: int, rule: str, severity: str) -> Callable[..., None]:
        """A fault of one rollout, the second of group 1: two whole turns at version 3."""

        def add(plant: Callable[[Spoilable, Rollout], None]) -> None:
            def in_it(batch: Spoilable) -> set[str]:
                r = batch.of(1, 1)
                plant(batch, r)
                return {r.trajectory["trajectory_id"]}

            self.append(Fault(plant.__name__, gate, rule, severity, in_it))

        return add
