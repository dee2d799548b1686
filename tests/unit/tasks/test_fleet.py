"""Who gets a request, and what becomes of it when an engine is lost."""

import asyncio
from dataclasses import replace

import pytest

from tasks.engines.fleet import Fleet
from tasks.engines.protocol import EngineLost, Request
from tasks.engines.torch_engine import TorchEngine
from tests.engine_models import PLAIN, publish


class Recorded(TorchEngine):
    """A torch engine that notes what it was asked, and can be lost."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.asked: list[str] = []
        self.is_lost = False

    async def generate(self, request):
        self.asked.append(request.request_id)
        if self.is_lost:
            raise EngineLost("its machine has lost power")
        return await super().generate(request)

    async def update(self, *arguments):
        if self.is_lost:
            raise EngineLost("its machine has lost power")
        return await super().update(*arguments)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("published"))


def member(published, index: int, engine_class=Recorded, **changes):
    arguments = {"num_slots": 32, "max_model_tokens": 64, "num_threads": 1, **changes}
    return engine_class(published.path, engine_id=f"torch-{index}", **arguments)


async def fleet_of(published, *members, patience_s: float = 0.05) -> Fleet:
    fleet = Fleet(members, patience_s=patience_s)
    for each in members:
        await each.update(0, published.path, published.root_hash, "wait")
        fleet.admit(each)
    return fleet


def request(group: int, sample: int) -> Request:
    sampling = replace(PLAIN, seed=16 * group + sample)
    return Request(f"{group}-{sample}", (1 + group, 2), sampling, (), affinity=f"group-{group}")


def test_a_group_stays_together_and_groups_spread(published):
    async def main():
        members = [member(published, index) for index in range(3)]
        fleet = await fleet_of(published, *members)
        asked = [request(group, sample) for group in range(6) for sample in range(4)]
        await asyncio.gather(*(fleet.generate(each) for each in asked))
        return members

    members = asyncio.run(main())
    groups = [{name.split("-")[0] for name in each.asked} for each in members]
    assert sorted(group for each in groups for group in each) == list("012345")
    assert [len(each) for each in groups] == [2, 2, 2]
    assert [len(each.asked) for each in members] == [8, 8, 8]


def test_a_lost_engines_requests_are_asked_of_another_with_the_same_tokens(published):
    async def main():
        members = [member(published, index) for index in range(2)]
        fleet = await fleet_of(published, *members)
        asked = [request(group, sample) for group in range(2) for sample in range(4)]
        before = await asyncio.gather(*(fleet.generate(each) for each in asked))
        members[1].is_lost = True
        after = await asyncio.gather(*(fleet.generate(each) for each in asked))
        return fleet, members, before, after

    fleet, members, before, after = asyncio.run(main())
    assert fleet.out_of_traffic == [members[1]]
    assert fleet.reason_out(members[1]) == "its machine has lost power"
    assert {g.engine_id for g in before} == {"torch-0", "torch-1"}
    assert {g.engine_id for g in after} == {"torch-0"}
    assert [g.token_ids for g in before] == [g.token_ids for g in after]
    assert fleet.describe().engine_id == "torch-0"


def test_with_nobody_left_a_request_waits_and_then_says_why(published):
    async def main():
        only = member(published, 0)
        fleet = await fleet_of(published, only)
        only.is_lost = True
        with pytest.raises(EngineLost, match=r"for 0.05 s \(torch-0: its machine has lost power\)"):
            await fleet.generate(request(0, 0))
        return fleet

    assert asyncio.run(main()).describe().weight_version is None


def test_a_waiting_request_goes_to_the_engine_that_returns(published):
    async def main():
        only = member(published, 0)
        fleet = await fleet_of(published, only, patience_s=5.0)
        only.is_lost = True
        waiting = asyncio.create_task(fleet.generate(request(0, 0)))
        await asyncio.sleep(0.05)
        assert fleet.out_of_traffic == [only] and not waiting.done()
        only.is_lost = False
        fleet.admit(only)
        return await waiting

    assert len(asyncio.run(main()).token_ids) == PLAIN.max_tokens


def test_a_request_that_costs_engine_after_engine_ends_with_its_error(published):
    async def main():
        members = [member(published, index) for index in range(5)]
        fleet = await fleet_of(published, *members)
        for each in members:
            each.is_lost = True
        with pytest.raises(EngineLost, match="lost power"):
            await fleet.generate(request(0, 0))
        return fleet

    assert len(asyncio.run(main()).out_of_traffic) == 4


def test_an_engine_that_cannot_update_leaves_traffic(published, tmp_path):
    other = publish(tmp_path, seed=1)

    async def main():
        members = [member(published, index) for index in range(3)]
        fleet = await fleet_of(published, *members)
        members[1].is_lost = True
        attestations = await fleet.update(1, other.path, other.root_hash, "keep")
        lied_to = await fleet.update(2, other.path, "another hash", "keep")
        return fleet, attestations, lied_to

    fleet, attestations, lied_to = asyncio.run(main())
    assert [(a.engine_id, a.ok) for a in attestations] == [
        ("torch-0", True),
        ("torch-1", False),
        ("torch-2", True),
    ]
    assert attestations[1].reason == "its machine has lost power"
    assert [a.ok for a in lied_to] == [False, False] and len(fleet.out_of_traffic) == 3


def test_an_engine_of_another_kind_is_not_admitted(published):
    async def main():
        only, other = member(published, 0), member(published, 1, max_model_tokens=32)
        fleet = Fleet([only, other], patience_s=0.05)
        for each in (only, other):
            await each.update(0, published.path, published.root_hash, "wait")
        fleet.admit(only)
        with pytest.raises(ValueError, match="one build, model and set of flags"):
            fleet.admit(other)
        # The kind is the run's, whoever is in traffic.
        only.is_lost = True
        with pytest.raises(EngineLost):
            await fleet.generate(request(0, 0))
        with pytest.raises(ValueError, match="one build, model and set of flags"):
            fleet.admit(other)

    asyncio.run(main())
