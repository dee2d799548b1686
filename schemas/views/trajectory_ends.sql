-- trajectory_ends: how every recorded train rollout ended, one row each.
--
-- ended    trained, admitted (a batch not trained yet), refused, quarantined, dropped, imported
--          (never trained here) or waiting
-- reason   the rule and its sentence; NULL unless refused, quarantined or dropped
-- step     optimizer step that trained it; NULL unless trained
WITH out AS (
    SELECT run_id, trajectory_id,
        arg_min(action, rank) AS action, arg_min(rule || ': ' || reason, rank) AS reason
    FROM (
        SELECT *, CASE action WHEN 'refuse' THEN 0 WHEN 'quarantine' THEN 1 ELSE 2 END AS rank
        FROM quarantine
    ) GROUP BY run_id, trajectory_id
),
admitted AS (
    -- Gate 2's newest word on the admission: a waiver has a refused batch accepted after all.
    SELECT b.run_id, b.trajectory_id, arg_max(l.kind, l.seq) AS word,
        arg_max(l.details->>'reason', l.seq) AS reason
    FROM batches b
    LEFT JOIN ledger l ON l.run_id = b.run_id
        AND l.kind IN ('batch_accepted', 'batch_refused')
        AND (l.details->>'admission')::BIGINT = b.admission
    GROUP BY b.run_id, b.trajectory_id
)
SELECT t.run_id, t.trajectory_id, t.group_id,
    CASE
        WHEN st.step IS NOT NULL THEN 'trained'
        WHEN o.action = 'refuse' OR a.word = 'batch_refused' THEN 'refused'
        WHEN o.action = 'quarantine' THEN 'quarantined'
        WHEN o.action = 'drop' THEN 'dropped'
        WHEN a.trajectory_id IS NOT NULL THEN 'admitted'
        WHEN t.origin IS NOT NULL THEN 'imported'
        ELSE 'waiting'
    END AS ended,
    CASE
        WHEN o.reason IS NULL AND a.word = 'batch_refused' THEN 'refused: ' || a.reason
        ELSE o.reason
    END AS reason,
    st.step
FROM trajectories t
LEFT JOIN step_trajectories st USING (run_id, trajectory_id)
LEFT JOIN out o USING (run_id, trajectory_id)
LEFT JOIN admitted a USING (run_id, trajectory_id)
WHERE t.split = 'train'
