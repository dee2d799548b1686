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
    run_id, trajectory_id, group_id, sample_index, split, environment,
    sequence_index, segment_index, turn_index,
    start_position + i AS position,
    token_ids[i + 1] AS token_id,
    kind,
    kind = 'action' AND split = 'train' AS loss_mask,
    rollout_logprobs[i + 1] AS rollout_logprob,
    weight_version, kv_version_min
FROM (
    SELECT s.*, t.group_id, t.sample_index, t.split, t.environment,
        -- One unnest of the index, so that lists of unlike length cannot slide past each other.
        unnest(range(len(s.token_ids))) AS i
    FROM segments s JOIN trajectories t USING (run_id, trajectory_id)
)
