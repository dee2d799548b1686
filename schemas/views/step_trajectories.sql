-- step_trajectories: which optimizer step trained each trajectory.
--
-- num_minibatches    steps in the batch
-- minibatch          step within the batch, from 1: equal slices of the batch's order
-- step               optimizer step of the run, from 1
-- loss_name, correction, w_cap   what the step was configured with
SELECT
    b.run_id, b.admission, b.batch, b.trajectory_id,
    1 + b.batch_position * a.num_minibatches // a.num_trajectories AS minibatch,
    a.first_step + b.batch_position * a.num_minibatches // a.num_trajectories AS step,
    a.num_minibatches, a.loss_name, a.correction, r.w_cap
FROM batches b
JOIN (
    SELECT run_id, admission, min(step) AS first_step, count(*) AS num_minibatches,
        sum(num_trajectories)::BIGINT AS num_trajectories,
        any_value(loss_name) AS loss_name, any_value(correction) AS correction
    FROM steps GROUP BY run_id, admission
) a USING (run_id, admission)
JOIN (
    SELECT run_id, (details->'config'->'trainer'->>'w_cap')::DOUBLE AS w_cap
    FROM ledger WHERE kind = 'run_created'
) r USING (run_id)
