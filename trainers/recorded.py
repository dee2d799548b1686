"""A trained batch as lake and ledger have it: everything that went into its steps."""

from dataclasses import dataclass

import pyarrow as pa

from schemas.config import RunConfig
from tasks.lake import Entry, Lake, Ledger
from trainers.following import standing
from trainers.job import read_scores
from trainers.policy import Policy
from trainers.scoring import Scores, scores_from_table
from trainers.sequences import TrainingBatch, read_training_batch
from trainers.steps import Row


@dataclass(frozen=True)
class Recorded:
    """A trained batch as lake and ledger have it."""

    trained: Entry
    batch: TrainingBatch
    score_rows: pa.Table
    scores: Scores
    steps: list[Row]


def read_recorded(
    lake: Lake, ledger: Ledger, config: RunConfig, number: int, policy: Policy
) -> Recorded:
    """Raises `ValueError` where rows are missing or cannot be what was trained."""
    run_id = config.run.run_id
    trained = ledger.last("batch_trained", batch=number)
    assert trained is not None, f"batch {number} is trained"
    admitted = standing(ledger.entries[: trained.seq], number)
    if admitted is None or admitted.accepted is None:
        raise ValueError(f"the ledger has no accepted admission of batch {number}.")
    batch = read_training_batch(lake, run_id, admitted.admission, policy.routed_layers)
    vocab_size = policy.model.config.vocab_size
    for sequence, trajectory in zip(
        batch.sequences, batch.sequence_trajectory.tolist(), strict=True
    ):
        if not bool(((sequence.token_ids >= 0) & (sequence.token_ids < vocab_size)).all()):
            raise ValueError(
                f"trajectory {batch.trajectory_ids[trajectory]} has a token that is not in the "
                f"model's vocabulary of {vocab_size}."
            )
    rows = read_scores(lake, run_id, admitted.admission, admitted.accepted)
    scores = scores_from_table(batch, rows)
    steps = lake.read("steps", run_id=run_id, write_ids=trained.write_ids).to_pylist()
    if [row["minibatch"] for row in steps] != list(range(1, config.batch.minibatches + 1)):
        raise ValueError(f"batch {number} has steps rows {[row['step'] for row in steps]}.")
    return Recorded(trained, batch, rows, scores, steps)
