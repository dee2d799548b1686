"""Gate 1, rules of the whole window: its tables `trajectories`, `segments` and `requests`, and
`recorded`, the ids that the ledger names already. All are counted over the window at once.
"""

from schemas.expectations.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        "trajectory_once",
        "batch",
        "window",
        "(SELECT count(*) - count(DISTINCT trajectory_id) FROM trajectories)"
        " + (SELECT count(*) FROM trajectories JOIN recorded USING (trajectory_id))",
        "No trajectory is recorded twice.",
        "A rollout that counts double in the gradient.",
    ),
    Rule(
        "request_once",
        "batch",
        "window",
        "(SELECT count(*) FROM requests) - (SELECT count(*) FROM"
        " (SELECT DISTINCT trajectory_id, turn_index, part_index FROM requests))",
        "No engine request is recorded twice.",
        "A retry written beside the request it repeats.",
    ),
    Rule(
        "segments_have_trajectory",
        "batch",
        "window",
        "(SELECT count(*) FROM segments ANTI JOIN trajectories USING (trajectory_id))",
        "Every segment belongs to a recorded trajectory.",
        "Tokens that nothing accounts for.",
    ),
    Rule(
        "logprobs_not_constant",
        "batch",
        "window",
        "(SELECT count(x) >= 64 AND count(DISTINCT x) = 1 FROM"
        " (SELECT unnest(rollout_logprobs) AS x FROM segments WHERE kind = 'action'))",
        "The window's log-probabilities are not all the same.",
        "A missing log-probability written as 0.0.",
    ),
    Rule(
        "failed_share",
        "batch",
        "window",
        "(SELECT coalesce(avg((status = 'failed')::INTEGER), 0) FROM trajectories)",
        "At most a quarter of the rollouts failed.",
        "A scorer or engine that fails again and again while rollouts are sampled for nothing.",
        maximum=0.25,
    ),
    Rule(
        "sampling_as_configured",
        "batch",
        "window",
        "(SELECT count(*) FROM trajectories t WHERE ("
        " t.sampling.temperature IS DISTINCT FROM CASE t.split WHEN 'train'"
        " THEN limits.temperature ELSE limits.heldout_temperature END"
        " OR t.sampling.top_p IS DISTINCT FROM limits.top_p"
        " OR t.sampling.top_k IS DISTINCT FROM limits.top_k"
        " OR t.sampling.min_p IS DISTINCT FROM limits.min_p"
        " OR t.sampling.max_tokens IS DISTINCT FROM limits.max_tokens))",
        "Rollouts were sampled with the configured parameters.",
        "A parameter that was defaulted or overridden on the way to the engine.",
    ),
    Rule(
        "logprobs_processed",
        "batch",
        "window",
        "(SELECT count(*) FROM trajectories"
        " WHERE logprobs_mode IS DISTINCT FROM 'processed_logprobs')",
        "Log-probabilities are those of the distribution that was really sampled from.",
        "Raw log-probabilities beside tokens sampled at another temperature.",
    ),
    Rule(
        "tokenizer_unchanged",
        "batch",
        "window",
        "(SELECT count(*) FROM trajectories"
        " WHERE tokenizer_sha256 IS DISTINCT FROM limits.tokenizer_sha256"
        " OR chat_template_sha256 IS DISTINCT FROM limits.chat_template_sha256"
        " OR tokenizer_sha256 <> limits.first_tokenizer_sha256"
        " OR chat_template_sha256 <> limits.first_chat_template_sha256)",
        "Tokenizer and chat template are the loaded ones, and those the run began with.",
        "Contexts that change meaning in mid run.",
    ),
    Rule(
        "engine_unchanged",
        "batch",
        "window",
        "(SELECT count(*) FROM trajectories WHERE engine IS DISTINCT FROM limits.engine)",
        "The engine build is the one that was probed.",
        "An engine exchanged while it was sampling.",
    ),
    Rule(
        "engine_as_before",
        "warning",
        "window",
        "(SELECT count(*) FROM trajectories WHERE engine <> limits.first_engine)",
        "The engine build is the one the run began with.",
        "An engine upgraded in mid run: gate 2 judges whether its numbers still agree.",
    ),
    Rule(
        "window_trainable",
        "warning",
        "window",
        "(SELECT coalesce((min(limits.published_version - weight_version_max) > limits.max_lag)"
        "::INTEGER, 0) FROM trajectories WHERE split = 'train')",
        "Some rollout is within max_lag of the published version.",
        "Sampling so far behind that admission will drop all of it as stale.",
    ),
    Rule(
        "reward_varies",
        "warning",
        "window",
        "(SELECT count(DISTINCT group_id) >= 4 AND count(reward) > 0 AND min(reward) = max(reward)"
        " FROM trajectories WHERE split = 'train')",
        "Rewards of four groups or more are not all the same.",
        "A scorer that gives everyone the same, or tasks too hard or too easy to learn from.",
    ),
)
