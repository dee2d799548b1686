"""Row 4: gate 1 over the reference batch, against the same counts in hand-written SQL.

Both sides read the same Arrow tables in memory. The bare scan counts, a trajectory each, what the
rules count over tokens, segments, trajectories and the window, in one plain statement a level, as
somebody would write it who knew all rules beforehand. The gate adds one query made from the rules,
Great Expectations, and results that name the rule. Warm: Great Expectations is imported before.
"""

from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np

from tasks.profile import profile_rollouts
from tasks.validate import judge
from tests.benchmarks.lake.measure import by_turns, verdict
from tests.benchmarks.lake.reference_batch import LIMITS, make_batch

BY_TRAJECTORY = """
    WITH placed AS (
        SELECT *, len(token_ids) AS n, kind = 'action' AS act,
            sum(len(token_ids)) OVER w - len(token_ids) AS expected_start,
            lag(weight_version) OVER w AS version_before
        FROM segments
        WINDOW w AS (PARTITION BY trajectory_id, sequence_index ORDER BY segment_index)
    ),
    s AS (
        SELECT trajectory_id, sum(n) AS tokens, sum(n) FILTER (act) AS actions,
            min(weight_version) AS v_min, max(weight_version) AS v_max,
            count(*) FILTER (act AND len(rollout_logprobs) IS DISTINCT FROM n
                OR NOT act AND rollout_logprobs IS NOT NULL) AS bad_lengths,
            count(*) FILTER (list_count(rollout_logprobs) < n
                OR NOT isfinite(list_sum(rollout_logprobs))) AS bad_logprobs,
            count(*) FILTER (list_max(rollout_logprobs) > 0) AS positive,
            count(*) FILTER (act AND (weight_version IS NULL OR kv_version_min IS NULL))
                AS unversioned,
            count(*) FILTER (weight_version > 7) AS unpublished,
            count(*) FILTER (weight_version < version_before
                OR kv_version_min > weight_version) AS disordered,
            count(*) FILTER (list_min(token_ids) < 0 OR list_max(token_ids) >= 151936
                OR list_count(token_ids) < n) AS foreign_ids,
            count(*) FILTER (start_position <> expected_start) AS gaps,
            count(*) FILTER (segment_index = 0 AND kind NOT IN ('prompt', 'summary')) AS headless,
            count(*) FILTER (act AND n > 200) AS overlong
        FROM placed GROUP BY trajectory_id
    ),
    r AS (
        SELECT trajectory_id, sum(num_output_tokens) AS sampled,
            arg_max(finish_reason, (turn_index, part_index)) AS ended
        FROM requests GROUP BY trajectory_id
    ),
    g AS (
        SELECT group_id, count(DISTINCT sample_index) AS size, count(DISTINCT task_id) AS tasks
        FROM trajectories GROUP BY group_id
    )
    SELECT t.trajectory_id, s.* EXCLUDE (trajectory_id),
        t.num_tokens <> s.tokens OR t.num_action_tokens <> s.actions AS miscounted,
        t.num_action_tokens <> r.sampled AS unrequested,
        t.weight_version_min <> s.v_min OR t.weight_version_max <> s.v_max AS misdated,
        (t.status = 'truncated') <> (t.finish_reason = 'length') OR r.ended <> 'stop' AS misended,
        NOT isfinite(t.reward) OR t.reward NOT BETWEEN 0 AND 1 AS bad_reward,
        g.size <> 8 AS broken_group, g.tasks <> 1 AS mixed_group
    FROM trajectories t JOIN s USING (trajectory_id) JOIN r USING (trajectory_id)
    JOIN g USING (group_id) ORDER BY ALL
"""

WINDOW = """
    SELECT count(*) - count(DISTINCT trajectory_id) AS doubled,
        avg((status = 'failed')::INTEGER) AS failed,
        count(*) FILTER (sampling.temperature <> 1 OR sampling.top_p <> 1 OR sampling.top_k <> 0
            OR sampling.min_p <> 0 OR sampling.max_tokens <> 200) AS sampled_otherwise,
        count(*) FILTER (logprobs_mode <> 'processed_logprobs') AS raw,
        count(DISTINCT (tokenizer_sha256, chat_template_sha256, engine)) AS builds,
        (SELECT count(*) - count(DISTINCT (trajectory_id, turn_index, part_index)) FROM requests)
            AS doubled_requests,
        (SELECT count(*) FROM segments ANTI JOIN trajectories USING (trajectory_id)) AS orphans,
        (SELECT count(DISTINCT x) FROM
            (SELECT unnest(rollout_logprobs) AS x FROM segments WHERE kind = 'action')) AS logprobs
    FROM trajectories
"""


def lines(_: Path) -> Iterator[str]:
    batch = make_batch(0)
    recorded = batch.trajectories.select(["trajectory_id"]).slice(0, 0)

    def gate() -> None:
        profile = profile_rollouts(
            batch.trajectories, batch.segments, batch.requests, batch.routing, recorded, LIMITS
        )
        judgement = judge(1, "benchmark", profile, LIMITS)
        assert judgement.ok and not judgement.faults, judgement.reason

    def bare() -> None:
        connection = duckdb.connect()
        connection.register("trajectories", batch.trajectories)
        connection.register("segments", batch.segments)
        connection.register("requests", batch.requests)
        assert connection.sql(BY_TRAJECTORY).to_arrow_table().num_rows == 64
        connection.sql(WINDOW).fetchall()

    pairs = by_turns(gate, bare, num_pairs=15)
    allowed = [2 * b + 1 for b in pairs.baseline]
    ours, theirs = pairs.medians_ms()
    yield verdict(
        "gate 1: profile and expectations / (2 x bare scan + 1 s)",
        [s / a for s, a in zip(pairs.subject, allowed, strict=True)],
        "<=",
        1,
        f"{ours:.0f} ms against {theirs:.0f} ms, {np.median(pairs.slowdown()):.1f} times the scan",
    )
