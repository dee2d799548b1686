"""Gate 1 on routing: honest rows pass, each planted fault is caught by the rule that names it."""

from collections.abc import Callable

import numpy as np
import pytest

from tasks.rollout import Rollout
from tests.factories import ROUTED_LIMITS, window
from tests.gate_judgements import failed_rules, gate1


def change_routing(index: int, **values: object) -> Callable[[Rollout], None]:
    return lambda r: r.routing[index].update(values)


def cut_rows(index: int, num_rows: int) -> Callable[[Rollout], None]:
    """Takes rows away from a segment's end, as an engine that loses them would."""

    def plant(r: Rollout) -> None:
        row = r.routing[index]
        row["num_rows"] -= num_rows
        row["experts"] = row["experts"][: row["num_rows"] * 3 * 2]

    return plant


def drop_routing(index: int) -> Callable[[Rollout], None]:
    def plant(r: Rollout) -> None:
        del r.routing[index]

    return plant


def drop_all_routing(r: Rollout) -> None:
    r.routing.clear()


def double_routing(r: Rollout) -> None:
    r.routing.append(dict(r.routing[1]))


def one_row_too_many(r: Rollout) -> None:
    r.routing[0]["num_rows"] += 1
    r.routing[0]["experts"] += bytes(6)


def foreign_expert(r: Rollout) -> None:
    r.routing[1]["experts"] = bytes([8]) + r.routing[1]["experts"][1:]


def wide_foreign_expert(r: Rollout) -> None:
    """The same rows as uint16, one expert 256: its low byte would pass as expert 0."""
    row = r.routing[1]
    experts = np.frombuffer(row["experts"], np.uint8).astype("<u2")
    experts[-1] = 256
    row.update(dtype="uint16", experts=experts.tobytes())


def blank_last_row(r: Rollout) -> None:
    r.routing[1]["experts"] = r.routing[1]["experts"][:-6] + bytes(6)


def other_layers(r: Rollout) -> None:
    """As many bytes, read as 2 layers of 3 experts."""
    for row in r.routing:
        row.update(num_layers=2, top_k=3)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("plant", "rule"),
    [
        (change_routing(1, dtype="uint16"), "routing_shape"),
        (change_routing(1, dtype="int8"), "routing_shape"),
        (change_routing(1, num_layers=4), "routing_shape"),
        (change_routing(1, experts=b""), "routing_shape"),
        (change_routing(1, num_rows=2**31 - 1, num_layers=2**15 - 1), "routing_shape"),
        (change_routing(1, num_rows=-1), "routing_shape"),
        (other_layers, "routing_shape"),
        (double_routing, "routing_shape"),
        (one_row_too_many, "routing_shape"),
        (cut_rows(0, 1), "routing_complete"),
        (cut_rows(1, 1), "routing_complete"),
        (cut_rows(3, 1), "routing_complete"),
        (drop_routing(2), "routing_complete"),
        (drop_all_routing, "routing_complete"),
        (foreign_expert, "routing_in_range"),
        (wide_foreign_expert, "routing_in_range"),
        (blank_last_row, "routing_not_blank"),
    ],
)
def test_gate_1_quarantines_faulty_routing(
    plant: Callable[[Rollout], None], rule: str, known: bool
):
    limits = ROUTED_LIMITS if known else {"num_experts": 8}
    rollouts = window(groups=4, turns=2, routed=True)
    plant(rollouts[5])
    judgement = gate1(rollouts, **limits)
    assert judgement.ok, judgement.refusals
    assert rule in failed_rules(judgement)
    assert {fault.trajectory_id for fault in judgement.faults} == {"00000001-001-0"}


def test_gate_1_passes_honest_routing_with_and_without_the_last_row():
    for seed in range(10):
        rollouts = window(seed, groups=2, turns=1 + seed % 3, routed=True)
        last = rollouts[3].routing[-1]
        last["num_rows"] += 1
        last["experts"] += bytes([0, 1, 2, 3, 4, 7])
        assert not failed_rules(gate1(rollouts, **ROUTED_LIMITS))


def test_gate_1_refuses_the_routing_of_an_engine_that_captured_nothing():
    rollouts = window(routed=True)
    for r in rollouts:
        for row in r.routing:
            row["experts"] = bytes(len(row["experts"]))
    judgement = gate1(rollouts, **ROUTED_LIMITS)
    assert not judgement.ok and failed_rules(judgement) == {"routing_not_blank", "row_fault_share"}
    # Where one expert is chosen, expert 0 in every layer may be the choice.
    for r in rollouts:
        for row in r.routing:
            row.update(top_k=1, experts=bytes(3 * row["num_rows"]))
    assert not failed_rules(gate1(rollouts, **{**ROUTED_LIMITS, "num_experts_per_token": 1}))


def test_gate_1_takes_a_last_segment_of_one_token_without_routing():
    rollouts = window(turns=2, routed=True)
    r = rollouts[0]
    last, num_cut = r.segments[-1], len(r.segments[-1]["token_ids"]) - 1
    del last["token_ids"][:-1], last["rollout_logprobs"][:-1], r.routing[-1]
    for key in ("num_tokens", "num_action_tokens"):
        r.trajectory[key] -= num_cut
    r.requests[-1]["num_output_tokens"] = 1
    assert not failed_rules(gate1(rollouts, **ROUTED_LIMITS))


def test_gate_1_asks_no_routing_of_a_rollout_that_no_engine_saw():
    rollouts = window(turns=1, routed=True)
    r = rollouts[0]
    del r.segments[1:]
    r.requests.clear()
    r.routing.clear()
    r.trajectory.update(
        status="failed", finish_reason="prompt", reward=None, num_action_tokens=0,
        num_tokens=len(r.segments[0]["token_ids"]), weight_version_min=None,
        weight_version_max=None,
    )  # fmt: skip
    assert not failed_rules(gate1(rollouts, **ROUTED_LIMITS))


def test_gate_1_refuses_routing_from_an_engine_that_claims_to_report_none():
    judgement = gate1(window(routed=True))
    assert not judgement.ok and failed_rules(judgement) == {"routing_complete", "row_fault_share"}


def test_gate_1_refuses_routing_of_a_segment_that_is_not_there():
    rollouts = window(routed=True)
    rollouts[0].routing.append({**rollouts[0].routing[0], "segment_index": 9})
    judgement = gate1(rollouts, **ROUTED_LIMITS)
    assert not judgement.ok and failed_rules(judgement) == {"routing_has_segment"}
