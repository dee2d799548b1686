"""Every metric of the views equals NumPy over the same stored columns."""

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from schemas.tables import TABLES
from tasks.lake.batches import trajectories_hash, write_batch
from tasks.lake.lake import Lake
from tasks.lake.lease import take_lease
from tasks.query import QueryRefused, connect, run_query
from tasks.record import Window, quarantine_rows
from tasks.rollout import Rollout
from tests.factories import rollout

RUN = "r"
BATCH, ADMITTED_FROM = 3, 2  # trained from version 2
# 1.3 is not a float32: the cap as stored is a little less.
MINIBATCHES, GROUPS, SIZE, CAP = 2, 4, 2, 1.3


def append(lake: Lake, table: str, rows, lease: int) -> str:
    if isinstance(rows, list):
        import pyarrow as pa

        rows = pa.Table.from_pylist(rows, schema=TABLES[table].own_schema)
    return lake.append(table, rows, run_id=RUN, cycle=0, lease=lease)


def make_rollouts() -> list[Rollout]:
    rng = np.random.default_rng(3)
    rollouts = [
        rollout(rng, g, s, version=int(rng.integers(1, 3)), turns=2)
        for g in range(GROUPS)
        for s in range(SIZE)
    ]
    # One token only, and a rollout of two versions.
    rollouts[0] = rollout(rng, 0, 0, version=2)
    action = rollouts[0].segments[-1]
    action["token_ids"], action["rollout_logprobs"] = action["token_ids"][:1], [-0.25]
    rollouts[1].segments[1]["weight_version"] = rollouts[1].segments[1]["kv_version_min"] = 1
    rollouts[1].segments[-1]["weight_version"] = rollouts[1].segments[-1]["kv_version_min"] = 2
    return rollouts


def make_scores(rollouts: list[Rollout], admission: int) -> list[dict]:
    rng = np.random.default_rng(2)
    rows = []
    for r in rollouts:
        for segment in r.segments:
            if segment["kind"] != "action":
                continue
            rollout_logprobs = np.asarray(segment["rollout_logprobs"])
            delta = rng.standard_t(3, len(rollout_logprobs)) * 0.4
            stale = segment["weight_version"] < ADMITTED_FROM
            own = rollout_logprobs + rng.normal(0, 1e-3, len(delta))
            rows.append(
                {
                    "admission": admission,
                    "batch": BATCH,
                    "trajectory_id": segment["trajectory_id"],
                    "sequence_index": 0,
                    "segment_index": segment["segment_index"],
                    "old_logprobs": (rollout_logprobs + delta).tolist(),
                    "own_version_logprobs": own.tolist() if stale else None,
                    "entropies": rng.uniform(0, 2, len(delta)).tolist(),
                    "correction_weights": np.minimum(np.exp(delta), CAP).tolist(),
                    "included": (rng.uniform(size=len(delta)) > 0.1).tolist(),
                }
            )
    return rows


def step_row(step: int, minibatch: int, admission: int) -> dict:
    names = TABLES["steps"].own_schema
    row = dict.fromkeys((field.name for field in names), 1.0)
    return row | {
        "step": step,
        "batch": BATCH,
        "admission": admission,
        "minibatch": minibatch,
        "mfu": None,
        "composition": [],
        "sequence_lengths": [],
        "logprobs_from": [],
        "processor": "cpu",
        "software": "torch",
        "metrics": [],
        "num_trajectories": GROUPS * SIZE // MINIBATCHES,
        "num_sequences": 4,
        "num_tokens": 10,
        "num_action_tokens": 10,
        "hardware": "cpu",
        "num_ranks": 1,
        "compute_dtype": "float32",
        "loss_name": "ppo_clip",
        "correction": "token_tis",
        "checkpoint": None,
        "root_hash": None,
        "finished_at": datetime.now(UTC),
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """A lake with one trained batch, one dropped group, and one write the ledger never named."""
    lake = Lake.create(tmp_path_factory.mktemp("lakes") / "lake")
    ledger = lake.ledger(RUN)
    config = {"config": {"trainer": {"w_cap": CAP}}}
    ledger.append("run_created", lease=0, cycle=0, details=config)
    lease = take_lease(ledger)
    rollouts = make_rollouts()
    rng = np.random.default_rng(5)
    dropped = [rollout(rng, 90, s, version=0) for s in range(SIZE)]
    rows = Window.of([*rollouts, *dropped])
    quarantined = quarantine_rows(
        [r.trajectory for r in dropped], rule="stale", action="drop", reason="too old"
    )
    ledger.append(
        "rollouts_recorded",
        lease=lease,
        write_ids=[
            append(lake, "trajectories", rows.trajectories, lease),
            append(lake, "segments", rows.segments, lease),
            append(lake, "requests", rows.requests, lease),
            append(lake, "quarantine", quarantined, lease),
        ],
    )
    lost = Window.of([rollout(rng, 99, 0)])
    append(lake, "trajectories", lost.trajectories, lease)
    append(lake, "segments", lost.segments, lease)
    ids = [r.trajectory["trajectory_id"] for r in rollouts]
    admission = len(ledger.entries)
    write_id = write_batch(
        lake,
        run_id=RUN,
        cycle=0,
        lease=lease,
        admission=admission,
        batch=BATCH,
        trajectory_ids=ids,
    )
    ledger.append(
        "batch_admitted",
        lease=lease,
        batch=BATCH,
        write_ids=[write_id],
        num_trajectories=len(ids),
        trajectories_hash=trajectories_hash(ids),
    )
    scores = make_scores(rollouts, admission)
    ledger.append(
        "batch_accepted",
        lease=lease,
        batch=BATCH,
        details={"admission": admission},
        write_ids=[append(lake, "scores", scores, lease)],
    )
    steps = [step_row(5, 1, admission), step_row(6, 2, admission)]
    ledger.append(
        "batch_trained",
        lease=lease,
        batch=BATCH,
        details={"admission": admission},
        write_ids=[append(lake, "steps", steps, lease)],
    )
    return lake, rollouts, scores


def per_step(rollouts: list[Rollout], scores: list[dict]) -> dict[int, list[dict]]:
    """step -> sequences, each a dict of arrays over its action tokens."""
    by_key = {(s["trajectory_id"], s["segment_index"]): s for s in scores}
    steps: dict[int, list[dict]] = {5: [], 6: []}
    for position, r in enumerate(rollouts):
        actions = [s for s in r.segments if s["kind"] == "action"]
        found = [by_key[s["trajectory_id"], s["segment_index"]] for s in actions]
        lengths = [len(s["token_ids"]) for s in actions]

        def f32(values) -> np.ndarray:
            return np.asarray(values, np.float32).astype(np.float64)

        def joined(name: str, found=found, f32=f32) -> np.ndarray:
            return np.concatenate([f32(score[name]) for score in found])

        mu = np.concatenate([f32(s["rollout_logprobs"]) for s in actions])
        old = joined("old_logprobs")
        version = np.repeat([s["weight_version"] for s in actions], lengths)
        unknown = [np.full(length, np.nan) for length in lengths]
        own = np.concatenate(
            [
                nans if s["own_version_logprobs"] is None else f32(s["own_version_logprobs"])
                for s, nans in zip(found, unknown, strict=True)
            ]
        )
        minibatch = position // (GROUPS * SIZE // MINIBATCHES)
        steps[5 + minibatch].append(
            {
                "mu": mu,
                "old": old,
                "own": own,
                "version": version,
                "minibatch": minibatch + 1,
                "weight": joined("correction_weights"),
                "included": np.concatenate([s["included"] for s in found]),
            }
        )
    return steps


def test_mismatch_by_step_equals_numpy(trained):
    lake, rollouts, scores = trained
    rows = connect(lake).sql("FROM mismatch_by_step").to_arrow_table().to_pylist()
    assert [row["step"] for row in rows] == [5, 6]
    for row in rows:
        sequences = per_step(rollouts, scores)[row["step"]]
        delta = np.concatenate([s["old"] - s["mu"] for s in sequences])
        w = np.exp(delta)
        audited = np.concatenate([~np.isnan(s["own"]) for s in sequences])
        drift = np.concatenate([s["old"] - s["own"] for s in sequences])[audited]
        engine = np.concatenate([s["own"] - s["mu"] for s in sequences])[audited]
        sums = np.array([np.sum(s["old"] - s["mu"]) for s in sequences])
        expected = {
            "num_tokens": len(delta),
            "num_sequences": len(sequences),
            "w_max": w.max(),
            "w_mean": w.mean(),
            "w_p99": np.exp(np.quantile(delta, 0.99)),
            "frac_w_gt_2": (w > 2).mean(),
            "kl_k1": (-delta).mean(),
            "kl_k3": (w - 1 - delta).mean(),
            "chi2_token": (w**2).mean() - 1,
            "log_chi2_seq_plus_1": np.log(np.exp(2 * sums).mean()),
            "ess_frac": w.sum() ** 2 / (len(w) * (w**2).sum()),
            "abs_logprob_diff_mean": np.abs(delta).mean(),
            "abs_logprob_diff_max": np.abs(delta).max(),
            "token_mult_prob_error": np.exp(np.abs(delta)).mean(),
            "log_ppl_diff": np.mean([(-s["old"]).mean() - (-s["mu"]).mean() for s in sequences]),
            "capped_frac": np.mean(
                np.concatenate([s["weight"] >= np.float32(CAP) for s in sequences])
            ),
            "masked_frac": np.mean(~np.concatenate([s["included"] for s in sequences])),
            "num_audited": audited.sum(),
            "policy_drift_mean_abs": np.abs(drift).mean(),
            "engine_mismatch_mean_abs": np.abs(engine).mean(),
            "engine_mismatch_max_abs": np.abs(engine).max(),
        }
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
        assert row.keys() - {"run_id", "step", "batch"} == expected.keys()


def test_staleness_by_step_equals_numpy(trained):
    lake, rollouts, scores = trained
    for row in connect(lake).sql("FROM staleness_by_step").to_arrow_table().to_pylist():
        sequences = per_step(rollouts, scores)[row["step"]]
        lag = np.concatenate([BATCH - 1 - s["version"] for s in sequences])
        steps = MINIBATCHES * lag + sequences[0]["minibatch"] - 1
        assert row["lag_versions_mean"] == pytest.approx(lag.mean())
        assert row["lag_versions_p90"] == pytest.approx(np.quantile(lag, 0.9))
        assert row["lag_versions_max"] == lag.max()
        assert row["lag_steps_mean"] == pytest.approx(steps.mean())
        assert row["lag_steps_p90"] == pytest.approx(np.quantile(steps, 0.9))
        assert row["lag_steps_max"] == steps.max()
        spans = [len(set(s["version"].tolist())) for s in sequences]
        assert row["version_span_mean"] == pytest.approx(np.mean(spans))
        assert row["dropped_frac"] == pytest.approx(2 / 10)
        assert row["queue_wait_s"] > 0


def test_trajectories_end_once(trained):
    lake, _, _ = trained
    rows = connect(lake).sql("SELECT ended, count(*) FROM trajectory_ends GROUP BY 1 ORDER BY 1")
    assert rows.fetchall() == [("dropped", 2), ("trained", 8)]


def test_tokens_unnest_every_segment_once(trained):
    lake, rollouts, _ = trained
    found = (
        connect(lake)
        .sql(
            "SELECT token_id, kind, rollout_logprob, position, loss_mask FROM tokens"
            " WHERE trajectory_id = '00000001-001-0' ORDER BY position"
        )
        .fetchall()
    )
    r = rollouts[3]
    ids = [i for s in r.segments for i in s["token_ids"]]
    assert [row[0] for row in found] == ids
    assert [row[3] for row in found] == list(range(len(ids)))
    logprobs = [
        x for s in r.segments for x in s["rollout_logprobs"] or [None] * len(s["token_ids"])
    ]
    for row, logprob in zip(found, logprobs, strict=True):
        assert (row[2] is None) == (logprob is None) == (row[1] != "action") == (not row[4])
        assert logprob is None or row[2] == pytest.approx(logprob, rel=1e-6)


def test_a_write_that_the_ledger_does_not_name_is_seen_only_in_all(trained):
    lake, _, _ = trained
    connection = connect(lake)
    query = "SELECT count(*) FROM {} WHERE trajectory_id = '00000099-000-0'"
    assert connection.sql(query.format("trajectories")).fetchall() == [(0,)]
    assert connection.sql(query.format("trajectories_all")).fetchall() == [(1,)]
    assert connection.sql(query.format("tokens_all")).fetchall() == [(0,)]


def test_views_of_an_empty_lake_are_empty(tmp_path: Path):
    connection = connect(Lake.create(tmp_path / "lake"))
    for name in ("mismatch_by_step", "staleness_by_step", "signals_by_step", "tokens"):
        assert connection.sql(f"FROM {name}").fetchall() == []


@pytest.mark.parametrize(
    "query",
    [
        "COPY (SELECT 1) TO '{outside}/x.csv'",
        "SELECT * FROM read_text('/etc/hostname')",
        "CREATE TABLE t AS SELECT 1",
        "ATTACH '{outside}/x.db'",
        "SELECT 1; SELECT 2",
        "SET enable_external_access = true",
        "INSTALL httpfs",
        "SELEC 1",
        "SELECT nothing FROM tokens",
        "SELECT kind::INT FROM ledger",
    ],
)
def test_anything_but_one_read_of_the_lake_is_refused(trained, query: str, tmp_path: Path):
    lake, _, _ = trained
    connection = connect(lake)
    with pytest.raises(QueryRefused):
        run_query(connection, query.format(outside=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_ledgers_details_are_json(trained):
    lake, _, _ = trained
    details = connect(lake).sql("SELECT details FROM ledger WHERE seq = 0").fetchone()
    assert details is not None and json.loads(details[0])["config"]["trainer"]["w_cap"] == CAP
