"""Row 5: analysis views over 50 M tokens, against hand-written SQL on one row a token.

The view's side opens a connection as `rollhouse sql` does (the log's files, what the ledger names,
every view) and asks; the flat side opens DuckDB on a list of Parquet files that hold each token's
step, so it joins nothing and filters nothing out. Its SQL takes exp(delta) as it is, where the view
stays in log space. Both sides must agree before either counts. Peak RSS is that of the view's side.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb

from tasks.query import connect
from tests.benchmarks.lake.analysis_lake import AnalysisLake, make_analysis_lake
from tests.benchmarks.lake.measure import by_turns, verdict

NUM_BATCHES = 101
NUM_PAIRS = 3
RSS_LIMIT_GIB = 8.0

FLAT_MISMATCH = """
    WITH scored AS (
        SELECT *, old_logprob::DOUBLE - rollout_logprob AS delta FROM flat
    ),
    sequences AS (
        SELECT step, sum(delta) AS s, avg(rollout_logprob::DOUBLE) - avg(old_logprob::DOUBLE) AS ppl
        FROM scored GROUP BY step, trajectory_id, sequence_index
    ),
    by_sequence AS (
        SELECT step, count(*) AS num_sequences, ln(avg(exp(2 * s))) AS log_chi2_seq_plus_1,
            avg(ppl) AS log_ppl_diff
        FROM sequences GROUP BY step
    )
    SELECT step, count(*) AS num_tokens, any_value(num_sequences), exp(max(delta)) AS w_max,
        avg(exp(delta)) AS w_mean, exp(quantile_cont(delta, 0.99)) AS w_p99,
        avg((delta > ln(2))::INTEGER) AS frac_w_gt_2, avg(-delta) AS kl_k1,
        avg(exp(delta) - 1 - delta) AS kl_k3, avg(exp(2 * delta)) - 1 AS chi2_token,
        any_value(log_chi2_seq_plus_1) AS log_chi2_seq_plus_1,
        sum(exp(delta)) ** 2 / (count(*) * sum(exp(2 * delta))) AS ess_frac,
        avg(abs(delta)) AS abs_logprob_diff_mean, max(abs(delta)) AS abs_logprob_diff_max,
        avg(exp(abs(delta))) AS token_mult_prob_error, any_value(log_ppl_diff) AS log_ppl_diff,
        avg((correction_weight >= w_cap)::INTEGER) AS capped_frac,
        avg((NOT included)::INTEGER) AS masked_frac, count(own_version_logprob) AS num_audited,
        avg(abs(old_logprob::DOUBLE - own_version_logprob)) AS policy_drift_mean_abs,
        avg(abs(own_version_logprob::DOUBLE - rollout_logprob)) AS engine_mismatch_mean_abs,
        max(abs(own_version_logprob::DOUBLE - rollout_logprob)) AS engine_mismatch_max_abs
    FROM scored JOIN by_sequence USING (step) GROUP BY step ORDER BY step
"""

FLAT_STALENESS = """
    WITH aged AS (
        SELECT step, trajectory_id, weight_version, batch - 1 - weight_version AS lag_versions,
            num_minibatches * (batch - 1 - weight_version) + minibatch - 1 AS lag_steps
        FROM flat
    ),
    spans AS (
        SELECT step, avg(versions) AS version_span_mean FROM (
            SELECT step, trajectory_id, count(DISTINCT weight_version) AS versions
            FROM aged GROUP BY step, trajectory_id) GROUP BY step
    )
    SELECT step, count(*) AS num_tokens, avg(lag_versions) AS lag_versions_mean,
        quantile_cont(lag_versions, 0.9) AS lag_versions_p90,
        max(lag_versions) AS lag_versions_max, avg(lag_steps) AS lag_steps_mean,
        quantile_cont(lag_steps, 0.9) AS lag_steps_p90, max(lag_steps) AS lag_steps_max,
        any_value(version_span_mean) AS version_span_mean
    FROM aged JOIN spans USING (step) GROUP BY step ORDER BY step
"""

FLAT_TURNS = """
    SELECT turn_index, count(*) AS n, avg(rollout_logprob::DOUBLE) AS mean, avg(entropy::DOUBLE)
    FROM flat GROUP BY turn_index ORDER BY turn_index
"""
VIEW_TURNS = """
    SELECT turn_index, count(*) AS n, avg(rollout_logprob) AS mean, avg(entropy)
    FROM token_scores GROUP BY turn_index ORDER BY turn_index
"""

QUESTIONS = {
    "mismatch_by_step": (
        "SELECT * EXCLUDE (run_id, batch) FROM mismatch_by_step",
        FLAT_MISMATCH,
    ),
    "staleness_by_step": (
        "SELECT step, num_tokens, lag_versions_mean, lag_versions_p90, lag_versions_max,"
        " lag_steps_mean, lag_steps_p90, lag_steps_max, version_span_mean FROM staleness_by_step",
        FLAT_STALENESS,
    ),
    "token_scores, a mean by turn": (VIEW_TURNS, FLAT_TURNS),
}


def lines(folder: Path, num_batches: int = NUM_BATCHES) -> Iterator[str]:
    made = make_analysis_lake(folder, num_batches)
    flat_bytes = sum(Path(path).stat().st_size for path in made.flat_files)
    lake_bytes = sum(
        Path(path).stat().st_size
        for table in ("segments", "scores")
        for path in made.lake.files(table)
    )
    yield (
        f"context: {made.num_tokens / 1e6:.1f} M trained tokens; segments and scores hold "
        f"{lake_bytes / 2**20:.0f} MiB, the flat files {flat_bytes / 2**20:.0f} MiB"
    )
    peak = 0.0
    for name, (view_sql, flat_sql) in QUESTIONS.items():
        ask, ask_flat = _sides(made, view_sql, flat_sql)
        _reset_peak()
        rows = ask()
        peak = max(peak, _peak_gib())
        _agree(rows, ask_flat())
        pairs = by_turns(ask, ask_flat, num_pairs=NUM_PAIRS, warm_up=False)
        ours, theirs = (ms / 1e3 for ms in pairs.medians_ms())
        yield verdict(
            f"view {name}: time / flat Parquet",
            pairs.slowdown(),
            "<=",
            1.15,
            f"{ours:.1f} against {theirs:.1f} CPU-s",
        )
    yield verdict("views: peak RSS, GiB", [peak], "<=", RSS_LIMIT_GIB)


def _sides(
    made: AnalysisLake, view_sql: str, flat_sql: str
) -> tuple[Callable[[], list[tuple]], Callable[[], list[tuple]]]:
    def ask() -> list[tuple]:
        with connect(made.lake) as connection:
            return connection.sql(view_sql).fetchall()

    def ask_flat() -> list[tuple]:
        listed = ", ".join(f"'{path}'" for path in made.flat_files)
        with duckdb.connect() as connection:
            connection.sql(f"CREATE VIEW flat AS SELECT * FROM read_parquet([{listed}])")
            return connection.sql(flat_sql).fetchall()

    return ask, ask_flat


def _agree(rows: list[tuple], flat_rows: list[tuple]) -> None:
    assert len(rows) == len(flat_rows) > 0
    for row, flat in zip(rows, flat_rows, strict=True):
        for value, other in zip(row, flat, strict=True):
            assert math.isclose(value, other, rel_tol=1e-6, abs_tol=1e-9), (row, flat)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_gib() -> float:
    """Peak resident memory since `_reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20
