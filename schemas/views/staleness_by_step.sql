-- staleness_by_step: how old trained tokens were, and what was dropped for it, one row a step.
--
-- num_tokens                                    what the row counts
-- lag_versions_mean, lag_versions_p90, lag_versions_max   weight versions
-- lag_steps_mean, lag_steps_p90, lag_steps_max            optimizer steps
-- version_span_mean      mean number of weight versions in one trajectory
-- queue_wait_s           mean seconds from a rollout's end to its batch's admission
-- dropped_frac           of the trajectories dropped or admitted since the batch before, those dropped
-- dropped_length_bias    mean action tokens of the dropped less that of the admitted; NULL if none
-- dropped_reward_bias    the same for reward
WITH by_token AS (
    SELECT run_id, step, any_value(batch) AS batch, any_value(admission) AS admission,
        count(*) AS num_tokens,
        avg(lag_versions) AS lag_versions_mean,
        quantile_cont(lag_versions, 0.9) AS lag_versions_p90,
        max(lag_versions) AS lag_versions_max,
        avg(lag_steps) AS lag_steps_mean,
        quantile_cont(lag_steps, 0.9) AS lag_steps_p90,
        max(lag_steps) AS lag_steps_max
    FROM token_scores GROUP BY run_id, step
),
spans AS (
    SELECT run_id, step, avg(versions) AS version_span_mean FROM (
        SELECT run_id, step, trajectory_id, count(DISTINCT weight_version) AS versions
        FROM token_scores GROUP BY run_id, step, trajectory_id
    ) GROUP BY run_id, step
),
admissions AS (
    SELECT run_id, seq AS admission, committed_at,
        lag(seq, 1, -1) OVER (PARTITION BY run_id ORDER BY seq) AS previous
    FROM ledger WHERE kind = 'batch_admitted'
        -- An admission that was refused has no step to show what was dropped before it.
        AND EXISTS (FROM steps s WHERE s.run_id = ledger.run_id AND s.admission = ledger.seq)
),
waits AS (
    SELECT st.run_id, st.step, avg(epoch(a.committed_at - t.finished_at)) AS queue_wait_s
    FROM step_trajectories st
    JOIN trajectories t USING (run_id, trajectory_id)
    JOIN admissions a USING (run_id, admission)
    GROUP BY st.run_id, st.step
),
drops AS (
    SELECT q.run_id, a.admission, count(*) AS num_dropped,
        avg(t.num_action_tokens) AS length, avg(t.reward) AS reward
    FROM quarantine q
    JOIN ledger l ON l.run_id = q.run_id AND list_contains(l.write_ids, q.write_id)
    JOIN admissions a ON a.run_id = q.run_id AND l.seq > a.previous AND l.seq < a.admission
    JOIN trajectories t ON t.run_id = q.run_id AND t.trajectory_id = q.trajectory_id
    WHERE q.action = 'drop' AND t.split = 'train'
    GROUP BY q.run_id, a.admission
),
admitted AS (
    SELECT b.run_id, b.admission, count(*) AS num_admitted,
        avg(t.num_action_tokens) AS length, avg(t.reward) AS reward
    FROM batches b JOIN trajectories t USING (run_id, trajectory_id)
    GROUP BY b.run_id, b.admission
)
SELECT k.run_id, k.step, k.batch, k.num_tokens,
    lag_versions_mean, lag_versions_p90, lag_versions_max,
    lag_steps_mean, lag_steps_p90, lag_steps_max,
    version_span_mean, queue_wait_s,
    coalesce(num_dropped, 0) / (coalesce(num_dropped, 0) + num_admitted) AS dropped_frac,
    d.length - m.length AS dropped_length_bias,
    d.reward - m.reward AS dropped_reward_bias
FROM by_token k
JOIN spans USING (run_id, step)
JOIN waits USING (run_id, step)
JOIN admitted m USING (run_id, admission)
LEFT JOIN drops d USING (run_id, admission)
ORDER BY k.run_id, k.step
