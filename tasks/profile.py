"""Profiles: what each gate's one DuckDB scan counts, one column a rule.

The rules are in `schemas.expectations`; this module turns them into two queries a gate, one row a
trajectory and one row for the window, so that Great Expectations never sees a token.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import duckdb
import pyarrow as pa

from schemas.expectations import RULES, Rule
from tasks.routing_facts import ROUTING_KEY, routing_facts
from tasks.seeds import derive_seed

# None where a bound is not known or does not apply; the rule that reads it says which.
Limits = Mapping[str, float | int | str | Sequence[int] | None]


@dataclass(frozen=True)
class Profile:
    """Counters of one gate: one row a trajectory, with its group, and one row for all."""

    by_trajectory: pa.Table
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


def _window(connection: duckdb.DuckDBPyConnection, rules: Iterable[Rule]) -> pa.Table:
    counters = _counters(rules, "window", "({})::DOUBLE AS {}")
    return connection.sql(f"SELECT {counters} FROM limits").to_arrow_table()


def _expected_seeds(trajectories: pa.Table, run_seed: int | None) -> pa.Table:
    """The seed of each trajectory's first request, from its place in the run; none without one."""
    seeds = (
        {}
        if run_seed is None
        else {
            row["trajectory_id"]: derive_seed(run_seed, row["group_id"], row["sample_index"], 0, 0)
            for row in trajectories.select(
                ["trajectory_id", "group_id", "sample_index"]
            ).to_pylist()
        }
    )
    return pa.table(
        {
            "trajectory_id": pa.array(seeds.keys(), pa.string()),
            "expected_seed": pa.array(seeds.values(), pa.int64()),
        }
    )


_KEY = ", ".join(ROUTING_KEY)

# One row a segment, so that a doubled one cannot multiply the segment itself.
_ROUTED = f"""
    SELECT {_KEY}, count(*) AS routing_count,
        any_value(num_rows) AS routing_rows,
        any_value(num_layers) AS routing_layers,
        any_value(top_k) AS routing_top_k,
        any_value(num_bytes) AS routing_bytes,
        any_value(item_bytes) AS routing_item_bytes,
        max(largest_expert) AS largest_expert,
        max(num_blank) AS routing_blank_rows,
        any_value(group_agreement) AS group_agreement
    FROM routing GROUP BY ALL
"""

_ORDERED = f"""
    SELECT segments.*, len(token_ids) AS num_tokens, routed.* EXCLUDE ({_KEY}), usual.*,
        max(weight_version) OVER earlier AS previous_version,
        coalesce(sum(len(token_ids)) OVER earlier, 0) AS expected_start,
        sum(len(token_ids)) FILTER (kind = 'action') OVER turn AS action_tokens,
        segment_index = max(segment_index) FILTER (kind = 'action') OVER turn AS is_last_action,
        segment_index = max(segment_index) OVER (
            PARTITION BY trajectory_id, sequence_index) AS is_last,
        bool_or(kind = 'action') OVER (PARTITION BY trajectory_id) AS was_forwarded
    FROM segments LEFT JOIN routed USING ({_KEY}),
        (SELECT mode(num_layers) AS usual_layers, mode(top_k) AS usual_top_k FROM routing) usual
    WINDOW earlier AS (
            PARTITION BY trajectory_id, sequence_index ORDER BY segment_index
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING),
        turn AS (PARTITION BY trajectory_id, sequence_index, turn_index)
"""

# What each turn's requests say beside what its segments hold. A part's prompt is the turn's, and
# what the parts before it returned.
_CALLS = """
    SELECT r.trajectory_id, count(*) AS num_requests,
        sum(num_output_tokens) AS request_tokens,
        arg_max(finish_reason, (turn_index, part_index)) AS last_request_finish,
        count(*) FILTER (drift <> 'clean') AS num_drifted,
        count(*) FILTER (num_prompt_tokens <> turn_start + earlier_tokens) AS num_unlike_prompts,
        count(*) FILTER (CASE finish_reason
            WHEN 'stop' THEN NOT list_contains(limits.stop_token_ids, last_token_id)
            WHEN 'length' THEN earlier_tokens + num_output_tokens <> limits.max_tokens
                AND num_prompt_tokens + num_output_tokens <> limits.max_model_tokens
            END) AS num_unlike_finishes
    FROM (
        SELECT *, coalesce(sum(num_output_tokens) OVER (
            PARTITION BY trajectory_id, turn_index ORDER BY part_index
            RANGE BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS earlier_tokens
        FROM requests) r
    LEFT JOIN (
        SELECT trajectory_id, turn_index, min(start_position) AS turn_start,
            arg_max(token_ids[-1], segment_index) AS last_token_id
        FROM segments WHERE kind = 'action' GROUP BY ALL) USING (trajectory_id, turn_index), limits
    GROUP BY r.trajectory_id
"""

# Twins agree in every action token and log-probability, whatever their ids.
_CONTENTS = """
    SELECT *, count(*) OVER (PARTITION BY content) - 1 AS num_twins
    FROM (
        SELECT trajectory_id, -sum(list_sum(rollout_logprobs)) AS surprisal,
            sum(hash(sequence_index, segment_index, token_ids, rollout_logprobs)) AS content
        FROM segments WHERE kind = 'action' GROUP BY trajectory_id)
"""

_OPENINGS = """
    SELECT trajectory_id, any_value(hash(token_ids)) AS opening
    FROM segments WHERE sequence_index = 0 AND segment_index = 0 GROUP BY trajectory_id
"""

# A retry recorded beside the rollout it repeats makes no whole group.
_GROUPS = """
    SELECT group_id, count(DISTINCT task_id) AS group_tasks, mode(opening) AS group_opening,
        CASE WHEN count(*) = count(DISTINCT sample_index) THEN count(*) ELSE -1 END
            AS group_samples
    FROM trajectories LEFT JOIN openings USING (trajectory_id) GROUP BY group_id
"""


def _counted(rules: Iterable[Rule]) -> str:
    counters = _counters(rules, "segment", "sum(coalesce(({})::BIGINT, 0)) AS {}")
    return f"""
        SELECT s.trajectory_id, {counters},
            sum(s.num_tokens) AS segment_tokens,
            coalesce(sum(s.num_tokens) FILTER (s.kind = 'action'), 0) AS segment_action_tokens,
            min(s.weight_version) AS segment_version_min,
            max(s.weight_version) AS segment_version_max,
            count(DISTINCT s.sequence_index) AS segment_sequences
        FROM ordered s, limits GROUP BY s.trajectory_id
    """


_DESCRIBED = """
    SELECT t.*, c.* EXCLUDE (trajectory_id), x.* EXCLUDE (trajectory_id), o.opening,
        g.* EXCLUDE (group_id), seeds.expected_seed,
        coalesce(r.num_requests, 0) AS num_requests,
        coalesce(r.request_tokens, 0) AS request_tokens, r.last_request_finish,
        coalesce(r.num_drifted, 0) AS num_drifted, r.num_unlike_prompts, r.num_unlike_finishes
    FROM trajectories t
    LEFT JOIN counted c USING (trajectory_id)
    LEFT JOIN calls r USING (trajectory_id)
    LEFT JOIN contents x USING (trajectory_id)
    LEFT JOIN openings o USING (trajectory_id)
    LEFT JOIN groups g USING (group_id)
    LEFT JOIN seeds USING (trajectory_id)
"""


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
    run_seed = limits["run_seed"]
    assert run_seed is None or isinstance(run_seed, int)
    connection = _connect(
        limits,
        trajectories=trajectories,
        segments=segments,
        requests=requests,
        routing=routing_facts(routing, trajectories),
        recorded=recorded,
        seeds=_expected_seeds(trajectories, run_seed),
    )
    summed = _counters(rules, "segment", "coalesce({1}, 0)::DOUBLE AS {1}")
    by_trajectory = _counters(rules, "trajectory", "coalesce(({})::INTEGER, 0)::DOUBLE AS {}")
    profile = connection.sql(f"""
        WITH routed AS ({_ROUTED}), ordered AS ({_ORDERED}), counted AS ({_counted(rules)}),
            calls AS ({_CALLS}), contents AS ({_CONTENTS}), openings AS ({_OPENINGS}),
            groups AS ({_GROUPS}), described AS ({_DESCRIBED})
        SELECT trajectory_id, group_id, {summed}, {by_trajectory}
        FROM described t, limits ORDER BY trajectory_id
    """).to_arrow_table()
    return Profile(profile, _window(connection, rules))


_PAIRS = """
    CREATE TEMP TABLE pairs AS
    SELECT s.trajectory_id, s.sequence_index, s.segment_index, s.token_ids,
        s.rollout_logprobs, s.weight_version, s.kv_version_min,
        any_value(c.old_logprobs) AS old_logprobs,
        any_value(c.own_version_logprobs) AS own_version_logprobs,
        any_value(c.reference_logprobs) AS reference_logprobs,
        any_value(c.entropies) AS entropies,
        any_value(c.correction_weights) AS correction_weights,
        any_value(c.included) AS included,
        count(c.trajectory_id) AS num_scores
    FROM segments s LEFT JOIN scores c USING (trajectory_id, sequence_index, segment_index)
    GROUP BY ALL
"""

_TOKENS = """
    CREATE TEMP TABLE tokens AS
    WITH numbered AS (
        SELECT trajectory_id, sequence_index, weight_version, len(token_ids) AS num_tokens,
            unnest(range(len(token_ids))) AS position,
            rollout_logprobs, old_logprobs, correction_weights, included, entropies,
            CASE WHEN weight_version = kv_version_min THEN coalesce(own_version_logprobs,
                CASE WHEN weight_version = limits.old_version THEN old_logprobs END)
            END AS own_logprobs
        FROM pairs, limits
    ),
    read AS (
        SELECT trajectory_id, sequence_index, weight_version,
            position = 0 AS is_first, position = num_tokens - 1 AS is_last,
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
    )
    SELECT *, old_logprob - rollout_logprob AS log_w,
        sum(old_logprob - rollout_logprob) OVER of_sequence AS sequence_log_w,
        avg(old_logprob - rollout_logprob) OVER of_sequence AS sequence_mean_log_w
    FROM read WINDOW of_sequence AS (PARTITION BY trajectory_id, sequence_index)
"""


def profile_scores(
    trajectories: pa.Table, segments: pa.Table, scores: pa.Table, limits: Limits
) -> Profile:
    """Gate 2's counters. `segments` are the batch's action segments, `scores` its rows."""
    rules = RULES[2]
    connection = _connect(limits, trajectories=trajectories, segments=segments, scores=scores)
    connection.sql(_PAIRS)
    connection.sql(_TOKENS)
    counters = _counters(rules, "trajectory", "({})::DOUBLE AS {}")
    by_trajectory = connection.sql(f"""
        SELECT trajectory_id, any_value(t.group_id) AS group_id, {counters}
        FROM tokens JOIN trajectories t USING (trajectory_id), limits
        GROUP BY trajectory_id ORDER BY trajectory_id
    """).to_arrow_table()
    return Profile(by_trajectory, _window(connection, rules))
