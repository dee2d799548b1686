-- signals_by_step: the eight signals of an online run, one row an optimizer step.
--
-- max_w                  largest importance weight before any cap: engine mismatch
-- mean_lag_steps         average staleness in optimizer steps
-- stall_s, stall_share   seconds the trainer waited for the batch, and of all its time
-- mfu                    model FLOPs utilisation; NULL where no peak is known
-- reward_mean            of the step's train rollouts
-- heldout_pass_at_1      newest held-out pass@1 of a version the step started from or before
-- heldout_pass_at_k, k   the same at the largest k evaluated
-- entropy_mean           nats, at the sampling temperature
-- gradient_norm          before clipping
WITH best AS (
    SELECT run_id, weight_version, max(k) AS k,
        max(pass_at_k) FILTER (k = 1) AS pass_at_1, arg_max(pass_at_k, k) AS pass_at_k
    FROM evals WHERE split = 'heldout' GROUP BY run_id, weight_version
)
SELECT s.run_id, s.step, s.batch, s.minibatch, s.max_w, s.mean_lag_steps, s.stall_s,
    s.stall_s / nullif(s.stall_s + s.score_s + s.train_s + s.checkpoint_s, 0) AS stall_share,
    s.mfu, s.reward_mean, e.pass_at_1 AS heldout_pass_at_1, e.pass_at_k AS heldout_pass_at_k, e.k,
    s.entropy_mean, s.gradient_norm
FROM steps s
ASOF LEFT JOIN best e ON s.run_id = e.run_id AND s.batch - 1 >= e.weight_version
ORDER BY s.run_id, s.step
