"""Invariants of what was sampled, admitted, scored and trained: each a query for its faults."""

from collections.abc import Callable, Iterator
from functools import partial

from tasks.invariants.finding import Invariant
from tasks.invariants.snapshot import Snapshot
from tasks.lake.batches import trajectories_hash

TOKENS = """
WITH found AS (
    SELECT trajectory_id, count(*) AS segments, sum(len(token_ids)) AS tokens,
        coalesce(sum(len(token_ids)) FILTER (kind = 'action'), 0) AS actions,
        count(*) FILTER (kind = 'action'
            AND len(rollout_logprobs) IS DISTINCT FROM len(token_ids)) AS unequal,
        count(DISTINCT (sequence_index, segment_index)) AS distinct_segments,
        count(*) FILTER (start_position != expected) AS displaced
    FROM (
        SELECT *, coalesce(sum(len(token_ids)) OVER (
            PARTITION BY trajectory_id, sequence_index ORDER BY segment_index
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS expected
        FROM segments
    ) GROUP BY trajectory_id
)
SELECT CASE
    WHEN t.trajectory_id IS NULL
        THEN format('{} has {} segments and no trajectories row', f.trajectory_id, f.segments)
    WHEN coalesce(f.tokens, 0) != t.num_tokens OR coalesce(f.actions, 0) != t.num_action_tokens
        THEN format('{} has {} tokens ({} sampled), its segments hold {} ({})', t.trajectory_id,
            t.num_tokens, t.num_action_tokens, coalesce(f.tokens, 0), coalesce(f.actions, 0))
    WHEN f.distinct_segments != f.segments
        THEN format('{} has a segment twice', t.trajectory_id)
    WHEN f.displaced > 0
        THEN format('{} has {} segments out of their place', t.trajectory_id, f.displaced)
    ELSE format('{} has {} action segments without a log-probability for each token',
        t.trajectory_id, f.unequal)
END
FROM trajectories t FULL JOIN found f USING (trajectory_id)
WHERE NOT (f.trajectory_id IS NULL
        AND t.trajectory_id IN (SELECT trajectory_id FROM expired_trajectories))
    -- What gate 1 found wrong is in the record, and in the quarantine.
    AND coalesce(t.trajectory_id, f.trajectory_id)
        NOT IN (SELECT trajectory_id FROM quarantine WHERE action = 'quarantine')
    AND (t.trajectory_id IS NULL OR coalesce(f.tokens, 0) != t.num_tokens
        OR coalesce(f.actions, 0) != t.num_action_tokens OR f.distinct_segments != f.segments
        -- Of an import, log-probabilities may be unknown.
        OR f.displaced > 0 OR (f.unequal > 0 AND t.origin IS NULL))
ORDER BY coalesce(t.trajectory_id, f.trajectory_id)
"""

TRAJECTORIES_ONCE = """
SELECT format('{} is there {} times', trajectory_id, count(*))
FROM trajectories GROUP BY trajectory_id HAVING count(*) > 1 ORDER BY trajectory_id
"""

ADMITTED_ROWS = """
SELECT format('admission {} (batch {}): {} has no trajectories row', admission, b.batch,
    trajectory_id)
FROM batches b ANTI JOIN trajectories USING (trajectory_id)
UNION ALL
SELECT format('batches: {} rows of admission {}, which is no batch_admitted row that names them',
    count(*), b.admission)
FROM batches b
WHERE NOT EXISTS (FROM admissions a
    WHERE a.admission = b.admission AND list_contains(a.write_ids, b.write_id))
GROUP BY b.admission
"""

ADMITTED_ONCE = """
SELECT format('{} is in admissions {}', trajectory_id, list(admission ORDER BY admission))
FROM batches JOIN admissions USING (admission) WHERE word IS DISTINCT FROM 'batch_refused'
GROUP BY trajectory_id HAVING count(*) > 1 ORDER BY trajectory_id
"""

HELDOUT = """
SELECT format('admission {} (batch {}): {} is a held-out rollout', admission, b.batch,
    trajectory_id)
FROM batches b JOIN trajectories USING (trajectory_id) WHERE split != 'train'
ORDER BY admission, trajectory_id
"""

LAG = """
SELECT format('admission {} (batch {}): {} has tokens of version {}, newer than {}', admission,
    b.batch, trajectory_id, max(weight_version), b.batch - 1)
FROM batches b JOIN admissions USING (admission) JOIN segments USING (trajectory_id)
WHERE word IS DISTINCT FROM 'batch_refused' AND weight_version > b.batch - 1
GROUP BY admission, b.batch, trajectory_id ORDER BY admission, trajectory_id
"""

SCORES = """
WITH accepted AS (FROM admissions WHERE word = 'batch_accepted'),
expired AS (
    SELECT a.admission FROM accepted a JOIN ledger l ON l.seq = a.word_seq
    WHERE EXISTS (FROM expired_writes e WHERE list_contains(l.write_ids, e.write_id))
        AND NOT EXISTS (FROM scores s WHERE s.admission = a.admission)
),
wanted AS (
    SELECT a.admission, trajectory_id, sequence_index, segment_index, len(token_ids) AS tokens
    FROM accepted a JOIN batches b USING (admission) JOIN segments USING (trajectory_id)
    WHERE kind = 'action' AND a.admission NOT IN (FROM expired)
),
found AS (
    SELECT a.admission, trajectory_id, sequence_index, segment_index, count(*) AS times,
        any_value([len(old_logprobs), len(entropies), len(correction_weights), len(included),
            coalesce(len(own_version_logprobs), len(old_logprobs)),
            coalesce(len(reference_logprobs), len(old_logprobs))]) AS lengths
    FROM accepted a JOIN scores s USING (admission)
    WHERE trajectory_id NOT IN (
        SELECT trajectory_id FROM expired_trajectories ANTI JOIN segments USING (trajectory_id))
    GROUP BY ALL
)
SELECT format('admission {}: {} segment {}.{} has {}', admission, trajectory_id, sequence_index,
    segment_index, CASE
        WHEN f.times IS NULL THEN 'no scores row'
        WHEN w.tokens IS NULL THEN 'scores, but no action segment'
        WHEN f.times > 1 THEN f.times || ' scores rows'
        ELSE format('{} tokens and scores of lengths {}', w.tokens, f.lengths)
    END)
FROM wanted w FULL JOIN found f USING (admission, trajectory_id, sequence_index, segment_index)
WHERE f.times IS DISTINCT FROM 1 OR list_distinct(f.lengths) != [w.tokens] OR w.tokens IS NULL
ORDER BY admission, trajectory_id, sequence_index, segment_index
"""

UNKNOWN_ADMISSION = """
SELECT format('{}: {} rows of admission {}, which the ledger does not have', source, count(*),
    admission)
FROM (SELECT 'scores' AS source, admission FROM scores
    UNION ALL SELECT 'steps', admission FROM steps) ANTI JOIN admissions USING (admission)
GROUP BY source, admission
"""

STEPS = """
WITH found AS (
    SELECT a.batch, a.trained_seq, any_value(a.num_trajectories) AS num_trajectories,
        any_value(a.checkpoint) AS checkpoint, any_value(a.root_hash) AS root_hash,
        coalesce(list(s.minibatch ORDER BY s.minibatch) FILTER (s.step IS NOT NULL), []) AS parts,
        coalesce(list(s.step ORDER BY s.minibatch) FILTER (s.step IS NOT NULL), []) AS steps,
        sum(s.num_trajectories) AS trained,
        list(s.checkpoint ORDER BY s.minibatch) FILTER (s.checkpoint IS NOT NULL) AS checkpoints,
        list(s.root_hash ORDER BY s.minibatch) FILTER (s.root_hash IS NOT NULL) AS roots
    FROM admissions a
    LEFT JOIN steps s ON s.admission = a.admission
        AND list_contains(a.trained_write_ids, s.write_id)
    WHERE a.trained_seq IS NOT NULL GROUP BY a.batch, a.trained_seq
)
SELECT format('row {} (batch {}): {}', trained_seq, batch, CASE
    WHEN parts != range(1, 1 + $minibatches)
        THEN format('minibatches {} of {} have a steps row', parts, $minibatches)
    WHEN steps != range((batch - 1) * $minibatches + 1, batch * $minibatches + 1)
        THEN format('its steps are {}', steps)
    WHEN trained IS DISTINCT FROM num_trajectories
        THEN format('its steps trained {} of {} trajectories', trained, num_trajectories)
    WHEN checkpoints IS DISTINCT FROM [checkpoint]
        THEN format('its steps name checkpoints {}, the ledger {}', checkpoints, checkpoint)
    ELSE format('its steps name root hashes {}, the ledger {}', roots, root_hash)
END)
FROM found
WHERE parts != range(1, 1 + $minibatches)
    OR steps != range((batch - 1) * $minibatches + 1, batch * $minibatches + 1)
    OR trained IS DISTINCT FROM num_trajectories OR checkpoints IS DISTINCT FROM [checkpoint]
    OR roots IS DISTINCT FROM [root_hash]
ORDER BY trained_seq
"""

ENDS = """
WITH ends AS (
    SELECT trajectory_id, 'trained in batch ' || a.batch AS ending
    FROM batches JOIN admissions a USING (admission) WHERE trained_seq IS NOT NULL
    UNION ALL
    SELECT DISTINCT trajectory_id, action FROM quarantine
    UNION ALL
    -- Refused for good only once a reviewer or the controller quarantines it.
    SELECT trajectory_id, 'open' FROM batches JOIN admissions USING (admission)
    WHERE trained_seq IS NULL AND word IS DISTINCT FROM 'batch_refused' AND NOT $has_ended
)
SELECT CASE WHEN count(ending) = 0 THEN format('{} never ended', trajectory_id)
    ELSE format('{} ended as {}', trajectory_id, string_agg(ending, ' and ' ORDER BY ending)) END
FROM trajectories LEFT JOIN ends USING (trajectory_id)
WHERE split = 'train'
GROUP BY trajectory_id
HAVING count(ending) > 1 OR (count(ending) = 0 AND $has_ended)
ORDER BY trajectory_id
"""


def admission_faults(snapshot: Snapshot) -> Iterator[str]:
    """As many trajectories, in the same order, as the batch_admitted row says; each recorded."""
    rows = snapshot.connection.execute(
        "SELECT admission, list(trajectory_id ORDER BY batch_position) FROM batches GROUP BY 1"
    ).fetchall()
    admitted: dict[int, list[str]] = dict(rows)
    for entry in snapshot.of_kind("batch_admitted"):
        ids = admitted.get(entry["seq"], [])
        place = f"admission {entry['seq']} (batch {entry['batch']})"
        if len(ids) != entry["num_trajectories"]:
            yield f"{place} took {entry['num_trajectories']} trajectories, {len(ids)} are there"
        elif trajectories_hash(ids) != entry["trajectories_hash"]:
            yield f"{place} took other trajectories, or in another order, than are there"
    yield from snapshot.texts(ADMITTED_ROWS)


def step_faults(snapshot: Snapshot) -> list[str]:
    """One steps row a minibatch, numbered through the run; the last names what the ledger does."""
    minibatches = snapshot.config.get("batch", {}).get("minibatches", 1)
    rows = snapshot.connection.execute(STEPS, {"minibatches": minibatches}).fetchall()
    return [row[0] for row in rows] + snapshot.texts(UNKNOWN_ADMISSION)


def has_ended(snapshot: Snapshot) -> bool:
    """Whether the run's last cycle was closed, and no other opened since."""
    cycles = snapshot.of_kind("cycle_opened", "cycle_closed")
    return bool(cycles) and bool(cycles[-1]["details"].get("ends_run"))


def end_faults(snapshot: Snapshot) -> list[str]:
    """Every train rollout is trained, refused, quarantined or dropped, once; or waits, or is in an
    open batch, while the run goes on."""
    rows = snapshot.connection.execute(ENDS, {"has_ended": has_ended(snapshot)}).fetchall()
    return [row[0] for row in rows]


def _query(*queries: str) -> Callable[[Snapshot], list[str]]:
    return lambda snapshot: [fault for sql in queries for fault in snapshot.texts(sql)]


def _count(text: str, sql: str) -> Callable[[Snapshot], str]:
    return partial(_counted, text, sql)


def _counted(text: str, sql: str, snapshot: Snapshot) -> str:
    return text.format(snapshot.number(sql))


def _ended(snapshot: Snapshot) -> str:
    rows = snapshot.connection.execute(
        "SELECT ended, count(*) FROM trajectory_ends GROUP BY 1 ORDER BY 1"
    ).fetchall()
    return ", ".join(f"{count} {ended}" for ended, count in rows) or "no train rollouts"


ADMITTED = "SELECT count(*) FROM batches"

INVARIANTS = (
    Invariant(
        "tokens",
        _query(TRAJECTORIES_ONCE, TOKENS),
        _count("{} tokens", "SELECT sum(len(token_ids)) FROM segments"),
    ),
    Invariant(
        "admissions",
        lambda s: list(admission_faults(s)),
        _count("{} admissions", "SELECT count(*) FROM admissions"),
    ),
    Invariant("admitted_once", _query(ADMITTED_ONCE), _count("{} admitted", ADMITTED)),
    Invariant("heldout", _query(HELDOUT), _count("0 of {} admitted", ADMITTED)),
    Invariant(
        "lag",
        _query(LAG),
        _count(
            "at most {} versions",
            "SELECT max(b.batch - 1 - weight_version) FROM batches b"
            " JOIN segments USING (trajectory_id) WHERE kind = 'action'",
        ),
    ),
    Invariant("scores", _query(SCORES), _count("{} segments", "SELECT count(*) FROM scores")),
    Invariant("steps", step_faults, _count("{} steps", "SELECT count(*) FROM steps")),
    Invariant("ends", end_faults, _ended),
)
