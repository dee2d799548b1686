-- token_scores: one row a trained action token, engine and trainer side by side.
--
-- position              place in the sequence, from 0
-- token_id              as sampled
-- rollout_logprob       nats, log mu: under the distribution drawn from
-- old_logprob           nats, log pi_old: recomputed with version batch - 1
-- own_version_logprob   nats, recomputed with the token's own version; NULL outside the audit sample
-- delta                 old_logprob - rollout_logprob; the importance weight is w = exp(delta)
-- correction_weight     factor used in the loss, after cap
-- included              false where a correction's mask left it out
-- lag_versions          batch - 1 - weight_version
-- lag_steps             num_minibatches * lag_versions + minibatch - 1
-- correction, w_cap     correction of the step and its cap
-- entropy               nats, at the sampling temperature
SELECT
    p.run_id, p.step, p.batch, p.minibatch, p.admission, p.trajectory_id, p.sequence_index,
    p.segment_index, p.turn_index,
    p.start_position + i AS position,
    p.token_ids[i + 1] AS token_id,
    p.weight_version, p.kv_version_min,
    p.rollout_logprobs[i + 1]::DOUBLE AS rollout_logprob,
    p.old_logprobs[i + 1]::DOUBLE AS old_logprob,
    p.own_version_logprobs[i + 1]::DOUBLE AS own_version_logprob,
    p.old_logprobs[i + 1]::DOUBLE - p.rollout_logprobs[i + 1]::DOUBLE AS delta,
    p.correction_weights[i + 1]::DOUBLE AS correction_weight,
    p.included[i + 1] AS included,
    p.entropies[i + 1]::DOUBLE AS entropy,
    p.batch - 1 - p.weight_version AS lag_versions,
    p.num_minibatches * (p.batch - 1 - p.weight_version) + p.minibatch - 1 AS lag_steps,
    p.correction, p.w_cap
FROM (
    SELECT s.run_id, c.admission, c.batch, s.trajectory_id, s.sequence_index, s.segment_index,
        s.turn_index, s.start_position, s.token_ids, s.rollout_logprobs, s.weight_version,
        s.kv_version_min, c.old_logprobs, c.own_version_logprobs, c.correction_weights,
        c.included, c.entropies,
        st.step, st.minibatch, st.num_minibatches, st.correction, st.w_cap,
        -- One unnest of the index, so that lists of unlike length cannot slide past each other; last,
        -- so that what joins are segments and not tokens. Gate 1 has seen one log-probability for each
        -- token, and unlike token ids nearly every question reads them.
        unnest(range(len(s.rollout_logprobs))) AS i
    FROM segments s
    JOIN scores c USING (run_id, trajectory_id, sequence_index, segment_index)
    JOIN step_trajectories st ON st.run_id = s.run_id AND st.admission = c.admission
        AND st.trajectory_id = s.trajectory_id
) p
