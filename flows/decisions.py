"""A reviewer's decision takes effect: it is adopted, and what it sets off is done.

The next run does both under its own lease before it samples or trains anything. An approval leaves
the data refused, a waiver has the same data judged again without the waived rules. Each step is one
ledger row, so after a kill between any two the ledger says which one it still lacks.
"""

from flows.commits import accept_batch
from flows.evaluation import commit_evaluation
from flows.opening import OpenRun
from flows.refusals import refusal_error, refuse_batch, refuse_window, waivers_after
from flows.windows import commit_window
from tasks.decisions import decision_rows, undecided, unfinished_waivers
from tasks.history import read_history
from tasks.lake.batches import read_batch
from tasks.lake.ledger import Entry
from tasks.record import Window, judge_window, quarantine_rows
from tasks.train import judge_scores, write_ids_of


def require_decisions(run: OpenRun) -> None:
    """Raises `BatchRefused` for a refusal that nobody has decided on."""
    for refusal in undecided(run.ledger.entries):
        if not decision_rows(run.lake, run.run_id, refusal.seq):
            raise refusal_error(run.lake, run.run_id, refusal)


def carry_out_decisions(run: OpenRun) -> None:
    """Adopts what reviewers decided and does what follows from it, under the run's lease.

    Raises `BatchRefused` where nobody has decided, or where the data is refused by other rules than
    those that were waived.
    """
    require_decisions(run)
    for refusal in undecided(run.ledger.entries):
        _adopt(run, refusal)
    for adopted in unfinished_waivers(run.ledger.entries):
        refusal = run.ledger.entries[adopted.details["refusal"]]
        if refusal.details["admission"] is None:
            _judge_window_again(run, refusal, adopted)
        else:
            _judge_batch_again(run, refusal, adopted)


def _adopt(run: OpenRun, refusal: Entry) -> None:
    rows = decision_rows(run.lake, run.run_id, refusal.seq)
    decision, admission = rows[0]["decision"], refusal.details["admission"]
    write_ids = [rows[0]["write_id"]]
    if decision == "approve" and admission is not None:
        refused = read_batch(run.lake, run.run_id, admission).trajectories
        quarantined = quarantine_rows(
            refused.select(["trajectory_id", "group_id"]).to_pylist(),
            rule="refused",
            action="refuse",
            reason=refusal.details["reason"],
        )
        write_ids.append(run.append("quarantine", quarantined))
    run.commit(
        "decision_adopted",
        batch=refusal.batch,
        version=refusal.version,
        write_ids=tuple(write_ids),
        num_trajectories=refusal.num_trajectories,
        trajectories_hash=refusal.trajectories_hash,
        details={
            "refusal": refusal.seq,
            "decision": decision,
            "rules": [row["rule"] for row in rows if row["rule"] is not None],
            "reviewer": rows[0]["reviewer"],
        },
    )


def _judge_window_again(run: OpenRun, refusal: Entry, adopted: Entry) -> None:
    details = refusal.details
    waivers = waivers_after(refusal, adopted)
    window = Window.written(run.lake, run.run_id, details["held"])
    recorded = judge_window(
        run.lake,
        window,
        tuple(details["held"]),
        details["limits"],
        run_id=run.run_id,
        cycle=run.cycle,
        lease=run.lease,
        scope=details["scope"],
        waivers=waivers,
    )
    if not recorded.judgement.ok:
        raise refuse_window(
            run,
            recorded,
            details["limits"],
            details["scope"],
            batch=refusal.batch,
            version=refusal.version,
            again={"refusal": refusal.seq, "waivers": waivers},
        )
    if refusal.batch is None:
        assert refusal.version is not None, "a refused window has a batch or a version"
        commit_evaluation(run, window, recorded, refusal.version, refusal=refusal.seq)
    else:
        commit_window(run, recorded, details={"refusal": refusal.seq})


def _judge_batch_again(run: OpenRun, refusal: Entry, adopted: Entry) -> None:
    admission = refusal.details["admission"]
    waivers = waivers_after(refusal, adopted)
    batch = read_batch(run.lake, run.run_id, admission)
    scores = run.lake.read("scores", run_id=run.run_id, write_ids=refusal.write_ids)
    history = read_history(run.lake, run.run_id, run.config.gates.drift_batches)
    judgement = judge_scores(batch, scores, run.config, history, waivers)
    admitted = run.ledger.entries[admission]
    write_ids = (*write_ids_of(scores), run.append("validations", judgement.validations()))
    if not judgement.ok:
        again = {"refusal": refusal.seq, "waivers": waivers}
        raise refuse_batch(run, batch, admitted, judgement, write_ids, again)
    accept_batch(run, admitted, write_ids, {"refusal": refusal.seq})
