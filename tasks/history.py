"""What the last batches were like, read back from the lake for the drift rules of gate 2."""

from schemas.expectations import RULES
from tasks.lake.lake import Lake

STATISTICS = tuple(
    rule.id for rule in RULES[2] if rule.drift is not None and rule.drift.statistic == rule.id
)


def read_history(lake: Lake, run_id: str, num_batches: int) -> dict[str, list[float]]:
    """Values of each statistic in the run's last `num_batches` accepted batches, newest last.

    They are the observed values of the validations that each `batch_accepted` row names, so
    refused batches leave no trace. A statistic that a batch did not have is left out.
    """
    accepted = [e for e in lake.ledger(run_id).entries if e.kind == "batch_accepted"]
    write_ids = [name for entry in accepted[-num_batches:] for name in entry.write_ids]
    history: dict[str, list[float]] = {name: [] for name in STATISTICS}
    if write_ids:
        rows = lake.read(
            "validations",
            run_id=run_id,
            columns=["rule", "observed"],
            where="gate = 2 AND observed IS NOT NULL AND list_contains(?, rule)",
            params=[list(STATISTICS)],
            write_ids=write_ids,
            order_by="judged_at",
        )
        for row in rows.to_pylist():
            history[row["rule"]].append(row["observed"])
    return history
