"""Profiles: what each gate's one DuckDB scan counts, one column a rule.

The rules are in `schemas.expectations`; this module turns them into two queries a gate, one row a
trajectory and one row for the window, so that Great Expectations never sees a token.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow as pa

from schemas.expectations import RULES, Rule

# None where a bound is not known or does not apply; the rule that reads it says which.
Limits = Mapping[str, float | int | str | None]


@dataclass(frozen=True)
class Profile:
    """Counters of one gate. `by_trajectory` is None where no rule is judged per trajectory."""

    by_trajectory: pa.Table | None
    window: pa.Table


def _connect(limits: Limits, **tables: pa.Table) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    for name, table in {**tables, "limits": pa.Table.from_pylist([dict(limits)])}.items():
        connection.register(name, table)
    return connection


def _counters(rules: Iterable[Rule], level: str, template: str) -> str:
    return ",\n".join(
        template.format(rule.counter, rule.id) for rule in rules if rule.level == level
    )


def _window(connection: duckdb.DuckDBPyConnection, rules: Iterable[Rule], rows: str) -> pa.Table:
    counters = _counters(rules, "window", "({})::DOUBLE AS {}")
    return connection.sql(
        f"SELECT (SELECT count(*) FROM {rows}) AS num_rows, {counters} FROM limits"
    ).to_arrow_table()


_ROUTING_KEY = ("trajectory_id", "sequence_index", "segment_index")


def _routing_facts(routing: pa.Table) -> pa.Table:
    """What the rules ask of each row of `routing`, without its experts.

    Beside the row's own numbers: `num_bytes`, `item_bytes` (0 for an unknown `dtype`), and, NULL
    where `experts` cannot be read so, `largest_expert` and `num_blank`, the tokens whose experts
    are 0 in every layer. DuckDB has no view of a blob's elements.
    """
    facts: dict[str, list[int | None]] = {
        name: [] for name in ("num_bytes", "item_bytes", "largest_expert", "num_blank")
    }
    shapes = routing.select(["dtype", "num_layers", "top_k"]).to_pylist()
    for shape, experts in zip(shapes, routing.column("experts"), strict=True):
        data = np.frombuffer(experts.as_buffer(), np.uint8)
        dtype = {"uint8": np.dtype("u1"), "uint16": np.dtype("<u2")}.get(shape["dtype"])
        item_bytes = dtype.itemsize if dtype else 0
        row_bytes = item_bytes * shape["num_layers"] * shape["top_k"]
        largest, num_blank = None, None
        if dtype and len(data) and row_bytes > 0 and len(data) % row_bytes == 0:
            largest = int(data.view(dtype).max())
            num_blank = int((~data.reshape(-1, row_bytes).any(axis=1)).sum())
        values = (len(data), item_bytes, largest, num_blank)
        for name, value in zip(facts, values, strict=True):
            facts[name].append(value)
    table = routing.select([*_ROUTING_KEY, "num_layers", "top_k", "num_rows"])
    for name, values in facts.items():
        table = table.append_column(name, pa.array(values, pa.int64()))
    return table


def profile_rollouts(
    trajectories: pa.Table,
    segments: pa.Table,
    requests: pa.Table,
    routing: pa.Table,
    recorded: pa.Table,
    limits: Limits,
    rules: Sequence[Rule] = RULES[1],
) -> Profile:
    """Gate 1's counters.

    `recorded` has the column `trajectory_id`: all that the ledger already names. `limits` holds
    the bounds that the rules reach as `limits.<name>`.
    """
    connection = _connect(
        limits,
        trajectories=trajectories,
        segments=segments,
        requests=requests,
        routing=_routing_facts(routing),
        recorded=recorded,
    )
    by_segment = _counters(rules, "segment", "sum(coalesce(({})::BIGINT, 0)) AS {}")
    summed = _counters(rules, "segment", "coalesce(c.{1}, 0)::DOUBLE AS {1}")
    by_trajectory = _counters(rules, "trajectory", "coalesce(({})::INTEGER, 0)::DOUBLE AS {}")
    profile = connection.sql(f"""
        WITH routed AS (
            -- One row a segment, so that a doubled one cannot multiply the segment itself.
            SELECT {", ".join(_ROUTING_KEY)}, count(*) AS routing_count,
                any_value(num_rows) AS routing_rows,
                any_value(num_layers) AS routing_layers,
                any_value(top_k) AS routing_top_k,
                any_value(num_bytes) AS routing_bytes,
                any_value(item_bytes) AS routing_item_bytes,
                max(largest_expert) AS largest_expert,
                max(num_blank) AS routing_blank_rows
            FROM routing GROUP BY ALL
        ),
        usual AS (
            SELECT mode(num_layers) AS usual_layers, mode(top_k) AS usual_top_k FROM routing
        ),
        ordered AS (
            SELECT segments.*, routed.* EXCLUDE ({", ".join(_ROUTING_KEY)}), usual.*,
                max(weight_version) OVER earlier AS previous_version,
                coalesce(sum(len(token_ids)) OVER earlier, 0) AS expected_start,
                sum(len(token_ids)) FILTER (kind = 'action') OVER (
                    PARTITION BY trajectory_id, sequence_index, turn_index) AS action_tokens,
                segment_index = max(segment_index) OVER (
                    PARTITION BY trajectory_id, sequence_index) AS is_last,
                bool_or(kind = 'action') OVER (PARTITION BY trajectory_id) AS was_forwarded
            FROM segments LEFT JOIN routed USING ({", ".join(_ROUTING_KEY)}), usual
            WINDOW earlier AS (
                PARTITION BY trajectory_id, sequence_index ORDER BY segment_index
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
        ),
        counted AS (
            SELECT s.trajectory_id,
                sum(len(s.token_ids)) AS segment_tokens,
                coalesce(sum(len(s.token_ids)) FILTER (s.kind = 'action'), 0)
                    AS segment_action_tokens,
                min(s.weight_version) AS segment_version_min,
                max(s.weight_version) AS segment_version_max,
                {by_segment}
            FROM ordered s, limits GROUP BY s.trajectory_id
        ),
        described AS (
            SELECT t.*, c.segment_tokens, c.segment_action_tokens,
                c.segment_version_min, c.segment_version_max,
                coalesce(r.request_tokens, 0) AS request_tokens, r.last_request_finish,
                g.group_samples, g.group_tasks
            FROM trajectories t
            LEFT JOIN counted c USING (trajectory_id)
            LEFT JOIN (
                SELECT trajectory_id, sum(num_output_tokens) AS request_tokens,
                    arg_max(finish_reason, (turn_index, part_index)) AS last_request_finish
                FROM requests GROUP BY trajectory_id) r USING (trajectory_id)
            LEFT JOIN (
                SELECT group_id,
                    -- A retry recorded beside the rollout it repeats makes no whole group.
                    CASE WHEN count(*) = count(DISTINCT sample_index) THEN count(*) ELSE -1 END
                        AS group_samples,
                    count(DISTINCT task_id) AS group_tasks
                FROM trajectories GROUP BY group_id) g USING (group_id)
        )
        SELECT t.trajectory_id, t.group_id, {summed}, {by_trajectory}
        FROM described t LEFT JOIN counted c USING (trajectory_id), limits
        ORDER BY t.trajectory_id
    """).to_arrow_table()
    return Profile(profile, _window(connection, rules, "trajectories"))


def profile_scores(segments: pa.Table, scores: pa.Table, limits: Limits) -> Profile:
    """Gate 2's counters. `segments` are the batch's action segments, `scores` its rows."""
    connection = _connect(limits, segments=segments, scores=scores)
    connection.sql("""
        CREATE TEMP TABLE pairs AS
        SELECT s.trajectory_id, s.sequence_index, s.segment_index, s.token_ids,
            s.rollout_logprobs, s.weight_version, s.kv_version_min,
            any_value(c.old_logprobs) AS old_logprobs,
            any_value(c.own_version_logprobs) AS own_version_logprobs,
            any_value(c.entropies) AS entropies,
            any_value(c.correction_weights) AS correction_weights,
            any_value(c.included) AS included,
            count(c.trajectory_id) AS num_scores
        FROM segments s LEFT JOIN scores c USING (trajectory_id, sequence_index, segment_index)
        GROUP BY ALL
    """)
    connection.sql("""
        CREATE TEMP TABLE tokens AS
        WITH numbered AS (
            SELECT trajectory_id, sequence_index, segment_index, weight_version,
                unnest(range(len(token_ids))) AS position,
                rollout_logprobs, old_logprobs, correction_weights, included, entropies,
                CASE WHEN weight_version = kv_version_min THEN coalesce(own_version_logprobs,
                    CASE WHEN weight_version = limits.old_version THEN old_logprobs END)
                END AS own_logprobs
            FROM pairs, limits
        )
        SELECT trajectory_id, weight_version,
            rollout_logprobs[position + 1]::DOUBLE AS rollout_logprob,
            old_logprobs[position + 1]::DOUBLE AS old_logprob,
            correction_weights[position + 1]::DOUBLE AS correction_weight,
            included[position + 1] AS included,
            entropies[position + 1]::DOUBLE AS entropy,
            own_logprobs[position + 1]::DOUBLE AS own_logprob,
            own_logprobs[position + 2]::DOUBLE AS next_own_logprob,
            CASE WHEN position > 0 THEN own_logprobs[position] END::DOUBLE
                AS previous_own_logprob
        FROM numbered
    """)
    return Profile(None, _window(connection, RULES[2], "tokens"))
