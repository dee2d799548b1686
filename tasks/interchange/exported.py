"""What an export holds: a batch as other trainers take it, or the result of a query.

A batch is one row a sequence, with the names that trainers share: prompt_ids, completion_ids and
completion_mask. The completion begins at the first sampled token and keeps the observations between
actions, which the mask leaves out. Advantages are not in the lake, so they are not in the export.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from tasks.lake.batches import read_batch
from tasks.lake.lake import Lake
from tasks.query import connect, stream_query

ROWS_PER_BATCH = 1024

BATCH_COLUMNS = {
    "run_id": "Run that sampled and trained it.",
    "batch": "Batch number.",
    "admission": "Ledger seq of the batch's admission.",
    "batch_position": "Place of the trajectory in the batch, from 0.",
    "trajectory_id": "Rollout, `{group:08d}-{sample:03d}-{attempt}`.",
    "sequence_index": "Sequence within the rollout, from 0; one row each.",
    "group_id": "Rollouts of one task that are compared with each other.",
    "sample_index": "Rollout within the group.",
    "task_id": "Hash of the problem's text.",
    "environment": "Environment that scored it.",
    "status": "completed or truncated.",
    "finish_reason": "Why its last turn ended.",
    "reward": "Return of the whole rollout.",
    "reward_components": "Parts of the reward by name.",
    "prompt_ids": "Token ids up to the first sampled token.",
    "completion_ids": "Token ids from the first sampled token on, observations included.",
    "completion_mask": "For each completion token, whether the policy sampled it.",
    "rollout_logprobs": "For each completion token, natural log of the probability it was drawn "
    "at; NULL where it was not sampled.",
    "weight_versions": "For each completion token, the weight version that sampled it; NULL where "
    "it was not sampled.",
    "sampling": "Sampling parameters as sent.",
    "tokenizer_sha256": "Hash of the tokenizer that the ids belong to.",
    "chat_template_sha256": "Hash of the chat template.",
    "messages": "The conversation as JSON text.",
}
"""Columns of a batch export and their meaning, in order."""

_BATCH_SQL = """
    WITH marked AS (
        SELECT *, kind = 'action' AS sampled,
            coalesce(segment_index >= min(segment_index) FILTER (kind = 'action') OVER (
                PARTITION BY trajectory_id, sequence_index), false) AS in_completion
        FROM batch_segments
    ),
    sequences AS (
        SELECT trajectory_id, sequence_index,
            flatten(list(token_ids ORDER BY segment_index) FILTER (NOT in_completion))
                AS prompt_ids,
            flatten(list(token_ids ORDER BY segment_index) FILTER (in_completion))
                AS completion_ids,
            flatten(list(list_resize([]::BOOLEAN[], len(token_ids), sampled)
                ORDER BY segment_index) FILTER (in_completion)) AS completion_mask,
            flatten(list(coalesce(rollout_logprobs,
                list_resize([]::FLOAT[], len(token_ids), NULL))
                ORDER BY segment_index) FILTER (in_completion)) AS rollout_logprobs,
            flatten(list(list_resize([]::BIGINT[], len(token_ids), weight_version)
                ORDER BY segment_index) FILTER (in_completion)) AS weight_versions
        FROM marked GROUP BY trajectory_id, sequence_index
    )
    SELECT {columns} FROM batch_trajectories JOIN sequences USING (trajectory_id)
    ORDER BY batch_position, sequence_index
"""


@dataclass(frozen=True)
class Rows:
    """What is exported: a schema, its rows as they come, and a title for people."""

    title: str
    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


def query_rows(lake: Lake, sql: str) -> Rows:
    """The result of one SELECT.

    Raises `QueryRefused` for anything else, and for a query that does not parse or run.
    """
    schema, batches = stream_query(connect(lake), sql, rows_per_batch=ROWS_PER_BATCH)
    return Rows("Result of a query over a rollout lakehouse.", schema, batches)


def batch_rows(lake: Lake, run_id: str, batch: int) -> Rows:
    """One row a sequence of an admitted batch, in training order.

    Raises `ValueError` if the run has not admitted it, or its last admission was refused.
    """
    ledger = lake.ledger(run_id)
    admitted = ledger.last("batch_admitted", batch=batch)
    if admitted is None:
        newest = ledger.last("batch_admitted")
        known = "none" if newest is None else f"1 to {newest.batch}"
        raise ValueError(f"Run {run_id} has no batch {batch}; it has {known}.")
    for entry in ledger.entries:
        if entry.kind == "batch_refused" and entry.details["admission"] == admitted.seq:
            raise ValueError(
                f"Batch {batch} of run {run_id} was refused ({entry.details['reason']}); export "
                "its rows with --query if you want to look at them."
            )
    found = read_batch(lake, run_id, admitted.seq)
    count = found.trajectories.num_rows
    trajectories = found.trajectories
    for name, values in {
        "batch": pa.repeat(pa.scalar(batch, pa.int64()), count),
        "admission": pa.repeat(pa.scalar(admitted.seq, pa.int64()), count),
        "batch_position": pa.array(range(count), pa.int32()),
    }.items():
        trajectories = trajectories.append_column(name, values)
    connection = connect(lake)
    connection.register("batch_trajectories", trajectories)
    connection.register("batch_segments", found.segments)
    sql = _BATCH_SQL.format(columns=", ".join(BATCH_COLUMNS))
    schema, batches = stream_query(connection, sql, rows_per_batch=ROWS_PER_BATCH)
    return Rows(f"Batch {batch} of run {run_id}, one row a sequence.", schema, batches)
