"""What a run achieved, read back from the lake alone."""

from typing import Any

from flows.display import SIGNAL_HEADERS
from flows.opening import OpenRun
from tasks.evaluate import estimate_pass_at_k, heldout_results, paired_gain
from tasks.query import connect
from tasks.weights.store import open_store


def summarise(run: OpenRun) -> dict[str, Any]:
    """One JSON-ready object; intervals are 95 %, over held-out problems."""
    ledger = run.ledger
    connection = connect(run.lake)
    where = f"WHERE run_id = '{run.run_id}'"

    def scalar(sql: str) -> Any:
        row = connection.sql(sql).fetchone()
        assert row is not None
        return row[0]

    evaluated = sorted(
        e.version or 0
        for e in ledger.entries
        if e.kind == "evaluated" and e.details["pass_at_1"] is not None
    )
    gain = before = after = None
    if evaluated:
        threshold = run.config.evaluation.pass_reward
        first = heldout_results(run.lake, run.run_id, evaluated[0], threshold)
        newest = heldout_results(run.lake, run.run_id, evaluated[-1], threshold)
        before = vars(estimate_pass_at_k(first, 1)) | {"version": evaluated[0]}
        after = vars(estimate_pass_at_k(newest, 1)) | {"version": evaluated[-1]}
        gain = vars(paired_gain(first, newest))
    seconds: dict[str, float] = {}
    for entry in ledger.entries:
        if entry.kind == "cycle_closed":
            for phase, value in entry.details["seconds"].items():
                seconds[phase] = round(seconds.get(phase, 0.0) + value, 3)
    trained = connection.sql(
        "SELECT coalesce(sum(score_s), 0), coalesce(sum(train_s), 0),"
        f" coalesce(sum(checkpoint_s), 0) FROM steps {where}"
    ).fetchone()
    assert trained is not None
    seconds |= {
        name: round(value, 3)
        for name, value in zip(("score", "train", "checkpoint"), trained, strict=True)
    }
    signals = connection.sql(
        f"SELECT step, {', '.join(SIGNAL_HEADERS)} FROM signals_by_step {where} ORDER BY step"
    )
    ended = dict(
        connection.sql(
            f"SELECT ended, count(*) FROM trajectory_ends {where} GROUP BY ended ORDER BY ended"
        ).fetchall()
    )
    warnings = (
        connection.sql(
            "SELECT gate, rule, count(*) AS times, arg_max(observed, judged_at) AS observed,"
            f" arg_max(expected, judged_at) AS expected FROM validations {where}"
            " AND severity = 'warning' AND NOT ok GROUP BY gate, rule ORDER BY gate, rule"
        )
        .to_arrow_table()
        .to_pylist()
    )
    return {
        "run_id": run.run_id,
        "cycles": sum(e.kind == "cycle_closed" for e in ledger.entries),
        "steps": scalar(f"SELECT count(*) FROM steps {where}"),
        "versions": scalar(f"SELECT count(*) FROM publications {where}"),
        "pass_at_1_before": before,
        "pass_at_1_after": after,
        "pass_at_1_gain": gain,
        "tokens_sampled": scalar(
            f"SELECT coalesce(sum(num_action_tokens), 0)::BIGINT FROM trajectories {where}"
        ),
        "tokens_trained": scalar(
            f"SELECT coalesce(sum(num_action_tokens), 0)::BIGINT FROM steps {where}"
        ),
        "trajectories": ended,
        "warnings": warnings,
        "seconds": seconds,
        "signals": [
            dict(zip(("step", *SIGNAL_HEADERS), row, strict=True)) for row in signals.fetchall()
        ],
        "lake": run.lake.uri,
        "data_docs": str(open_store(run.config).folder / "data_docs" / "index.html"),
    }
