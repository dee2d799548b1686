-- tokens_all: one row a token of every recorded rollout, held-out ones included.
--
-- position           place in the sequence, from 0
-- token_id           as sampled or sent
-- kind               prompt, action, observation or summary
-- loss_mask          true where the policy sampled the token in a train rollout
-- rollout_logprob    nats, under the distribution drawn from; NULL unless action
-- weight_version     weights that sampled it; NULL unless action
-- kv_version_min     oldest weights behind the cache it attended to; NULL unless action
SELECT
    s.run_id, s.trajectory_id, t.group_id, t.sample_index, t.split, t.environment,
    s.sequence_index, s.segment_index, s.turn_index,
    s.start_position + generate_subscripts(s.token_ids, 1) - 1 AS position,
    unnest(s.token_ids) AS token_id,
    s.kind,
    s.kind = 'action' AND t.split = 'train' AS loss_mask,
    -- Gate 1 has checked that the lists are as long as each other; a NULL list gives NULLs.
    unnest(s.rollout_logprobs) AS rollout_logprob,
    s.weight_version, s.kv_version_min
FROM segments s JOIN trajectories t USING (run_id, trajectory_id)
