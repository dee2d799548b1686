"""The range that history makes usual, and where history is read from."""

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from schemas.expectations import Drift
from schemas.tables import TABLES
from tasks.history import read_history
from tasks.lake.lake import Lake
from tasks.lake.lease import take_lease
from tasks.validate import usual_range
from tests.factories import scored, window
from tests.gate_judgements import gate2


@pytest.mark.parametrize(
    ("drift", "expected"),
    [
        # Median 3, standard deviation sqrt(2.5), median absolute deviation 1.
        (Drift("x", "both", 2.0, 0.0, 0.0), (3 - 2 * 2.5**0.5, 3 + 2 * 2.5**0.5)),
        (Drift("x", "both", 0.0, 0.5, 0.0), (1.5, 4.5)),
        (Drift("x", "both", 0.0, 0.5, "reward_step"), (-1.0, 7.0)),
    ],
)
def test_the_widest_of_three_distances_counts(drift: Drift, expected: tuple[float, float]):
    found = usual_range(drift, [1.0, 2.0, 3.0, 4.0, 5.0], {"reward_step": 4.0})
    assert found == pytest.approx(expected)


def test_a_robust_spread_counts_where_it_is_the_larger():
    # Median 0.5, median absolute deviation 0.5, standard deviation sqrt(1/3).
    found = usual_range(Drift("x", "both", 1.0, 0.0, 0.0), [0.0, 0.0, 1.0, 1.0], {})
    assert found == pytest.approx((0.5 - 0.7413, 0.5 + 0.7413))


def test_too_little_history_is_said_and_refuses_nothing():
    rollouts = window(groups=8)
    history = {"reward_mean": [5.0] * 9}
    result = {r.rule: r for r in gate2(rollouts, scored(rollouts), history).results}
    assert result["reward_mean"].ok and result["reward_collapse"].ok
    assert result["reward_collapse"].expected == "any: needs 10 batches, has 9"
    mean = sum(r.trajectory["reward"] for r in rollouts) / len(rollouts)
    assert result["reward_mean"].observed == pytest.approx(mean)
    history["reward_mean"].append(5.0)
    assert "reward_collapse" in gate2(rollouts, scored(rollouts), history).reason


def test_history_is_that_of_the_last_accepted_batches(tmp_path: Path):
    lake = Lake.create(tmp_path / "lake")
    lake.ledger("run").append("run_created", lease=0)
    lease = take_lease(lake.ledger("run"))

    def commit(kind: str, batch: int, reward: float | None) -> None:
        row = {
            "gate": 2, "rule": "reward_mean", "severity": "warning", "scope": "admission",
            "observed": reward, "expected": "any", "ok": True, "num_failed": 0,
            "judged_at": datetime.now(UTC),
        }  # fmt: skip
        rows = [row, row | {"rule": "scores_finite", "observed": 0.0}]
        table = pa.Table.from_pylist(rows, schema=TABLES["validations"].own_schema)
        write_id = lake.append("validations", table, run_id="run", cycle=0, lease=lease)
        lake.ledger("run").append(kind, lease=lease, cycle=0, batch=batch, write_ids=(write_id,))

    assert read_history(lake, "run", 3)["reward_mean"] == []
    for batch, reward in enumerate([0.1, 0.2, None, 0.4, 0.5], 1):
        commit("batch_accepted", batch, reward)
        commit("batch_refused", batch + 1, 9.0)
    history = read_history(lake, "run", 3)
    assert history["reward_mean"] == [0.4, 0.5], "the third last had no value"
    assert history["entropy_mean"] == []
