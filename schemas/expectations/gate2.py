"""Gate 2: what a batch must satisfy once the trainer's log-probabilities stand beside the engine's.

`tokens` has one row an action token of the batch: `rollout_logprob`, `old_logprob`,
`own_logprob` (recomputed at the token's own version: the audit sample, or old_logprob where the
token's version is the one trained from and its cache was computed by no other; else NULL),
`next_own_logprob` and `previous_own_logprob` (of its neighbours in the segment), and
`trajectory_id`. Engine mismatch is own - rollout; policy drift (old - own) is not a fault.
"""

from schemas.expectations.rule import Rule

_MISMATCH = "abs(own_logprob - rollout_logprob)"

RULES: tuple[Rule, ...] = (
    Rule(
        "scores_complete",
        "batch",
        "window",
        "(SELECT count(*) FROM pairs WHERE num_scores <> 1"
        " OR len(old_logprobs) IS DISTINCT FROM len(token_ids)"
        " OR len(entropies) IS DISTINCT FROM len(token_ids)"
        " OR len(correction_weights) IS DISTINCT FROM len(token_ids)"
        " OR len(included) IS DISTINCT FROM len(token_ids))"
        " + (SELECT count(*) FROM scores ANTI JOIN segments"
        " USING (trajectory_id, sequence_index, segment_index))",
        "Every action segment of the batch was scored once, token by token.",
        "A gradient for tokens whose old log-probability was never computed.",
    ),
    Rule(
        "scores_finite",
        "batch",
        "window",
        "(SELECT count(*) FROM tokens WHERE old_logprob IS NULL OR NOT isfinite(old_logprob)"
        " OR old_logprob > 0 OR correction_weight IS NULL OR NOT isfinite(correction_weight)"
        " OR correction_weight < 0 OR included IS NULL OR entropy IS NULL OR NOT isfinite(entropy)"
        " OR NOT isfinite(own_logprob))",
        "Old and own log-probabilities, entropies and weights are finite and of the right sign.",
        "A trainer forward that overflowed.",
    ),
    Rule(
        "lag_not_negative",
        "batch",
        "window",
        "(SELECT count(*) FROM tokens WHERE weight_version > limits.old_version)",
        "No token was sampled by weights newer than those it is trained from.",
        "A batch trained against the wrong version.",
    ),
    Rule(
        "lag_within_bound",
        "batch",
        "window",
        "(SELECT coalesce(max(limits.old_version - weight_version), 0) FROM tokens)",
        "No token is staler than max_lag.",
        "Stale rollouts let through.",
        maximum="max_lag",
    ),
    Rule(
        "audit_present",
        "batch",
        "window",
        "(SELECT (count(own_logprob) = 0)::INTEGER FROM tokens)",
        "Some tokens were recomputed at the version that sampled them.",
        "A comparison that passes because it compared nothing.",
    ),
    Rule(
        "logprobs_aligned",
        "batch",
        "window",
        "(SELECT coalesce((least(avg(abs(next_own_logprob - rollout_logprob)),"
        " avg(abs(previous_own_logprob - rollout_logprob)))"
        f" < 0.5 * avg({_MISMATCH}))::INTEGER, 0) FROM tokens"
        " WHERE next_own_logprob IS NOT NULL AND previous_own_logprob IS NOT NULL)",
        "Each log-probability fits its own token better than a neighbour's.",
        "Log-probabilities shifted by one position.",
    ),
    Rule(
        "temperature_applied",
        "batch",
        "window",
        "(SELECT coalesce((abs(sum(rollout_logprob) - sum(own_logprob))"
        " > 0.05 * abs(sum(own_logprob))"
        f" AND avg({_MISMATCH}) > limits.logprob_tolerance)::INTEGER, 0)"
        " FROM tokens WHERE own_logprob IS NOT NULL)",
        "The engine's surprisal summed over the batch is the trainer's.",
        "Log-probabilities taken before the temperature, or at another one.",
    ),
    Rule(
        "own_version_mismatch",
        "batch",
        "window",
        f"(SELECT coalesce(quantile_cont({_MISMATCH}, 0.99), 0) FROM tokens)",
        "At the version that sampled them, 99 % of tokens have the engine's log-probability within "
        "the tolerance.",
        "An engine that served other weights than it says, or another distribution than it logs.",
        maximum="logprob_tolerance",
    ),
    Rule(
        "share_off_by_factor",
        "batch",
        "window",
        "(SELECT coalesce(avg((abs(old_logprob - rollout_logprob)"
        " > ln(limits.off_factor))::INTEGER), 0) FROM tokens)",
        "Few tokens' probabilities differ between engine and trainer by more than the factor.",
        "A batch too far from the policy it would update.",
        maximum="max_share_off",
    ),
)
