-- mismatch_by_step: engine against trainer, one row an optimizer step, over all loss-eligible
-- action tokens before any correction or mask. delta = log pi_old - log mu, w = exp(delta),
-- S = sum of delta over a sequence. Sums of exponentials are taken in log space.
--
-- num_tokens, num_sequences   what the row counts
-- w_max, w_mean, w_p99        importance weights
-- frac_w_gt_2                 share of tokens with w > 2
-- kl_k1, kl_k3                mean(-delta), mean(exp(delta) - 1 - delta)
-- chi2_token                  mean(w^2) - 1
-- log_chi2_seq_plus_1         log mean exp(2 S)
-- ess_frac                    (sum w)^2 / (n sum w^2)
-- abs_logprob_diff_mean, abs_logprob_diff_max   of |delta|, nats
-- token_mult_prob_error       mean(exp(|delta|))
-- log_ppl_diff                mean over sequences of mean(-old) - mean(-rollout)
-- capped_frac, masked_frac    share of tokens at the cap, and left out by a mask
-- num_audited                 tokens of the audit sample, with a log-probability at their own version
-- policy_drift_mean_abs       mean |old - own|, over those
-- engine_mismatch_mean_abs, engine_mismatch_max_abs   of |own - rollout|, over those
WITH sequences AS (
    SELECT run_id, step, sum(delta) AS s, max(delta) AS peak,
        avg(-old_logprob) - avg(-rollout_logprob) AS ppl_diff
    FROM token_scores GROUP BY run_id, step, trajectory_id, sequence_index
),
peaks AS (
    SELECT run_id, step, max(peak) AS peak, max(2 * s) AS sequence_peak
    FROM sequences GROUP BY run_id, step
),
by_step AS (
    SELECT run_id, step, any_value(batch) AS batch, count(*) AS num_tokens,
        exp(any_value(peak)) AS w_max,
        any_value(peak) + ln(sum(exp(delta - peak))) AS log_sum_w,
        2 * any_value(peak) + ln(sum(exp(delta - peak) * exp(delta - peak))) AS log_sum_w2,
        exp(quantile_cont(delta, 0.99)) AS w_p99,
        avg((delta > ln(2))::INTEGER) AS frac_w_gt_2,
        avg(-delta) AS kl_k1,
        avg(abs(delta)) AS abs_logprob_diff_mean,
        max(abs(delta)) AS abs_logprob_diff_max,
        avg(exp(abs(delta))) AS token_mult_prob_error,
        avg((correction LIKE '%_tis' AND correction_weight >= w_cap::FLOAT)::INTEGER) AS capped_frac,
        avg((NOT included)::INTEGER) AS masked_frac,
        count(own_version_logprob) AS num_audited,
        avg(abs(old_logprob - own_version_logprob)) AS policy_drift_mean_abs,
        avg(abs(own_version_logprob - rollout_logprob)) AS engine_mismatch_mean_abs,
        max(abs(own_version_logprob - rollout_logprob)) AS engine_mismatch_max_abs
    FROM token_scores JOIN peaks USING (run_id, step)
    GROUP BY run_id, step
),
by_sequence AS (
    SELECT run_id, step, count(*) AS num_sequences,
        any_value(sequence_peak) + ln(avg(exp(2 * s - sequence_peak))) AS log_chi2_seq_plus_1,
        avg(ppl_diff) AS log_ppl_diff
    FROM sequences JOIN peaks USING (run_id, step) GROUP BY run_id, step
)
SELECT run_id, step, batch, num_tokens, num_sequences, w_max,
    exp(log_sum_w - ln(num_tokens)) AS w_mean, w_p99, frac_w_gt_2, kl_k1,
    exp(log_sum_w - ln(num_tokens)) - 1 + kl_k1 AS kl_k3,
    exp(log_sum_w2 - ln(num_tokens)) - 1 AS chi2_token,
    log_chi2_seq_plus_1,
    exp(2 * log_sum_w - log_sum_w2 - ln(num_tokens)) AS ess_frac,
    abs_logprob_diff_mean, abs_logprob_diff_max, token_mult_prob_error, log_ppl_diff,
    capped_frac, masked_frac, num_audited, policy_drift_mean_abs, engine_mismatch_mean_abs,
    engine_mismatch_max_abs
FROM by_step JOIN by_sequence USING (run_id, step)
ORDER BY run_id, step
