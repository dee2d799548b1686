"""A front to several engines of one kind: who gets a request, and who may get any at all.

Requests of a group go to one engine, so that their shared prompt is computed once; a new group goes
to the engine with the fewest requests. An engine is in traffic from the moment it is admitted until
it is lost or cannot attest what it should serve. What a lost engine had not returned is asked of
another, with the same seed: nothing of it was recorded, and under the same weights the seed makes
the answer the same but for rounding, so that no length is favoured. (If an update fails and its
requests are asked again under the new weights, they are drawn anew, and those still running were
the longer ones.) A request that merely took too long is never repeated, because that would favour
short answers.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tasks.engines.protocol import (
    Attestation,
    EngineDescription,
    EngineLost,
    EngineTimeout,
    Generation,
    Request,
    RolloutEngine,
    UpdateMode,
)

# Groups whose engine is remembered: those between two turns have no request in flight.
_NUM_REMEMBERED = 4096
# A request that takes down every engine it meets must end with its error, not the fleet.
_MAX_ENGINES_LOST = 4


class Fleet:
    """Engines of one build, in traffic or out of it.

    Args:
        members: at least one; none is in traffic before `admit`.
        patience_s: how long a request waits for an engine while none is in traffic.
    """

    def __init__(self, members: Sequence[RolloutEngine], *, patience_s: float) -> None:
        assert members, "a fleet has at least one engine"
        self.members = tuple(members)
        self._patience_s = patience_s
        self._in_traffic: list[RolloutEngine] = []
        self._num_running: Counter[RolloutEngine] = Counter()
        self._remembered: OrderedDict[str, RolloutEngine] = OrderedDict()
        self._someone = asyncio.Event()
        self._reasons: dict[RolloutEngine, str] = {}
        self._common: EngineDescription | None = None
        self.changing = asyncio.Lock()
        """Held by whoever updates or admits engines, so that none is admitted with old weights."""
        self.is_paused = False

    @property
    def out_of_traffic(self) -> list[RolloutEngine]:
        return [member for member in self.members if member not in self._in_traffic]

    def describe(self) -> EngineDescription:
        """What all admitted engines have in common; the identity is that of the first in traffic,
        and no version is served while there is none."""
        if self._in_traffic:
            return self._in_traffic[0].describe()
        assert self._common is not None, "no engine has been admitted yet"
        return replace(self._common, weight_version=None)

    def admit(self, member: RolloutEngine) -> None:
        """Gives traffic to an engine that has attested the newest version.

        Raises `ValueError` if it is of another build than those in traffic.
        """
        assert member in self.members and member not in self._in_traffic
        described = member.describe()
        if self._common is None:
            self._common = described
        own = {"engine_id": described.engine_id, "weight_version": described.weight_version}
        common = replace(self._common, **own)
        if described != common:
            raise ValueError(
                f"Engine {described.engine_id} is {described}, and the run began with {common}; "
                "start all servers of a run with one build, model and set of flags."
            )
        self._in_traffic.append(member)
        self._someone.set()

    def reason_out(self, member: RolloutEngine) -> str:
        """Why an engine is out of traffic."""
        return self._reasons.get(member, "it has not been admitted")

    def _expel(self, member: RolloutEngine, reason: str) -> None:
        """Takes an engine out of traffic."""
        if member in self._in_traffic:
            self._in_traffic.remove(member)
            self._reasons[member] = reason
        if not self._in_traffic:
            self._someone.clear()

    async def generate(self, request: Request) -> Generation:
        """Samples on one engine, or on another if that is lost before it answers.

        Raises `EngineLost` when no engine has been in traffic for `patience_s` or the request has
        cost several engines, and what the engine itself raises.
        """
        lost: EngineLost | None = None
        for _ in range(_MAX_ENGINES_LOST):
            member = await self._choose(request.affinity)
            self._num_running[member] += 1
            try:
                return await member.generate(request)
            except EngineLost as error:
                lost = error
                self._expel(member, str(error))
            finally:
                self._num_running[member] -= 1
        assert lost is not None
        raise lost

    async def update(
        self, version: int, weights_dir: Path, root_hash: str, mode: UpdateMode
    ) -> list[Attestation]:
        """Updates the engines in traffic side by side; those that fail are taken out of it."""
        started_s = time.perf_counter()

        async def one(member: RolloutEngine) -> Attestation:
            try:
                attestation = await member.update(version, weights_dir, root_hash, mode)
            except (EngineLost, EngineTimeout) as error:
                seconds = time.perf_counter() - started_s
                engine_id = member.describe().engine_id
                attestation = Attestation(
                    engine_id, version, "", None, ok=False, reason=str(error), seconds=seconds
                )
            if not attestation.ok:
                self._expel(member, str(attestation.reason))
            return attestation

        members = list(self._in_traffic)
        results = await asyncio.gather(*(one(m) for m in members), return_exceptions=True)
        # Raised once no update is under way any more.
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, Attestation)]

    async def pause(self) -> None:
        """Pauses the engines in traffic; none is attached before `resume`."""
        async with self.changing:
            self.is_paused = True
            await self._each(lambda member: member.pause())

    async def resume(self) -> None:
        async with self.changing:
            await self._each(lambda member: member.resume())
            self.is_paused = False

    async def _each(self, act: Callable[[RolloutEngine], Awaitable[None]]) -> None:
        """Has each engine in traffic do something; those that are gone leave traffic."""

        async def one(member: RolloutEngine) -> None:
            try:
                await act(member)
            except (EngineLost, EngineTimeout) as error:
                self._expel(member, str(error))

        await asyncio.gather(*(one(member) for member in list(self._in_traffic)))

    async def close(self) -> None:
        for member in self.members:
            await member.close()

    async def served(self) -> None:
        """Returns once an engine is in traffic; raises `EngineLost` after `patience_s`."""
        if self._in_traffic:
            return
        try:
            await asyncio.wait_for(self._someone.wait(), self._patience_s)
        except TimeoutError:
            reasons = "; ".join(
                f"{member.describe().engine_id}: {self.reason_out(member)}"
                for member in self.members
            )
            raise EngineLost(
                f"No engine has served the newest weights for {self._patience_s:g} s "
                f"({reasons}). Start one and run again."
            ) from None

    async def _choose(self, affinity: str) -> RolloutEngine:
        # Whoever was admitted may be gone by the time the waiting task runs.
        while not self._in_traffic:
            await self.served()
        member = self._remembered.get(affinity)
        if member not in self._in_traffic:
            member = min(self._in_traffic, key=lambda other: self._num_running[other])
        if affinity:
            self._remembered[affinity] = member
            self._remembered.move_to_end(affinity)
            if len(self._remembered) > _NUM_REMEMBERED:
                self._remembered.popitem(last=False)
        return member
