"""Gate 2: what a batch must satisfy once the trainer's log-probabilities stand beside the engine's.

`tokens` has one row an action token of the batch: `rollout_logprob`, `old_logprob`,
`own_logprob` (recomputed at the token's own version: the audit sample, or old_logprob where the
token's version is the one trained from and its cache was computed by no other; else NULL),
`next_own_logprob` and `previous_own_logprob` (of its neighbours in the segment), `is_first` and
`is_last` of its segment, `log_w` (old - rollout), `sequence_log_w` and `sequence_mean_log_w` (its
sum and mean over the sequence), `entropy`, `correction_weight`, `included`, `weight_version` and
`trajectory_id`. Engine mismatch is own - rollout; policy drift (old - own) is not a fault. `pairs`
has one row an action segment.
"""

from schemas.expectations.rule import Rule

_MISMATCH = "abs(own_logprob - rollout_logprob)"

# Formulas of trainers.corrections. e^80 is beyond any weight that counts, and below overflow.
_CONFIGURED_WEIGHT = (
    "CASE limits.correction WHEN 'none' THEN 1"
    " WHEN 'token_is' THEN exp(least(log_w, 80))"
    " WHEN 'token_tis' THEN exp(least(log_w, ln(limits.w_cap)))"
    " WHEN 'sequence_is' THEN exp(least(sequence_log_w, 80))"
    " WHEN 'sequence_tis' THEN exp(least(sequence_log_w, ln(limits.w_cap))) END"
)

_MASKED_LOG_RATIO = (
    "CASE limits.mask WHEN 'token' THEN log_w WHEN 'sequence' THEN sequence_log_w"
    " WHEN 'geometric' THEN sequence_mean_log_w END"
)

# True or false by the configured limits, NULL within rounding of one of them.
_CONFIGURED_INCLUDED = (
    "CASE WHEN limits.mask = 'none' THEN TRUE"
    f" WHEN exp(least({_MASKED_LOG_RATIO} - 1e-5, 80)) > limits.mask_high"
    f" OR exp(least({_MASKED_LOG_RATIO} + 1e-5, 80)) < limits.mask_low THEN FALSE"
    f" WHEN exp(least({_MASKED_LOG_RATIO} + 1e-5, 80)) <= limits.mask_high"
    f" AND exp(least({_MASKED_LOG_RATIO} - 1e-5, 80)) >= limits.mask_low THEN TRUE END"
)

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
        f"(SELECT coalesce((avg({_MISMATCH}) > limits.logprob_tolerance"
        " AND (abs(sum(rollout_logprob) - sum(own_logprob)) > 0.05 * abs(sum(own_logprob))"
        " OR abs(covar_pop(own_logprob - rollout_logprob, own_logprob))"
        " > 0.5 * sqrt(var_pop(own_logprob - rollout_logprob) * var_pop(own_logprob))))"
        "::INTEGER, 0)"
        " FROM tokens WHERE isfinite(own_logprob) AND isfinite(rollout_logprob))",
        "Engine and trainer agree in the batch's surprisal, and do not differ more the less likely "
        "a token is.",
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
    Rule(
        "trajectory_mismatch",
        "batch",
        "trajectory",
        f"coalesce(median({_MISMATCH}) > 3 * any_value(limits.logprob_tolerance), false)",
        "No rollout's median token is off by three tolerances at the version that sampled it.",
        "One rollout's tokens beside another's context or log-probabilities, too few to show in "
        "the batch.",
    ),
    Rule(
        "certain_logprobs_confirmed",
        "batch",
        "trajectory",
        "count(*) FILTER (rollout_logprob = 0"
        " AND (own_logprob < -10 * limits.logprob_tolerance"
        " OR old_logprob < -ln(limits.off_factor)))",
        "Where the engine says 0.0, a certain token, the trainer finds it certain too.",
        "A missing log-probability written as 0.0, for one token or for some.",
    ),
    Rule(
        "rollout_far_off",
        "warning",
        "trajectory",
        "coalesce(median(abs(log_w)) > 1, false)",
        "No rollout's median token is off by more than 1 nat under the weights trained from.",
        "A stale rollout that was spoilt, outside the audit sample.",
    ),
    Rule(
        "scores_of_admission",
        "batch",
        "window",
        "(SELECT count(*) FROM scores WHERE admission IS DISTINCT FROM limits.admission"
        " OR batch IS DISTINCT FROM limits.old_version + 1)",
        "Scores name the admission and batch that is judged.",
        "Scores of another batch, or of this one's refused predecessor.",
    ),
    Rule(
        "weights_as_configured",
        "batch",
        "window",
        "(SELECT count(*) FROM tokens WHERE CASE WHEN included THEN"
        f" abs(correction_weight - ({_CONFIGURED_WEIGHT})) > 0.01 * ({_CONFIGURED_WEIGHT}) + 1e-6"
        " ELSE correction_weight <> 0 END"
        f" OR included <> ({_CONFIGURED_INCLUDED}))",
        "Correction weights and masks are those of the configured correction.",
        "A correction with another cap, or of other log-probabilities, or a mask nobody asked for.",
    ),
    Rule(
        "reference_as_configured",
        "batch",
        "window",
        "(SELECT count(*) FROM pairs"
        " WHERE (reference_logprobs IS NULL) <> (limits.reference_version IS NULL)"
        " OR len(reference_logprobs) <> len(token_ids)"
        " OR len(list_filter(reference_logprobs, lambda x: isfinite(x) AND x <= 0))"
        " <> len(token_ids)"
        " OR (limits.reference_version >= limits.old_version"
        " AND reference_logprobs <> old_logprobs))",
        "Where a reference policy is configured every token was scored under it, and nowhere else.",
        "A KL penalty towards nothing, or towards a policy that is not the one named.",
    ),
    Rule(
        "mismatch_two_signed",
        "batch",
        "window",
        "(SELECT coalesce((count(*) >= 20 AND count(*) > 0.05 * any_value(num_compared)"
        " AND greatest(avg((own_logprob > rollout_logprob)::INTEGER),"
        " avg((own_logprob < rollout_logprob)::INTEGER)) > 0.95)::INTEGER, 0)"
        " FROM (SELECT own_logprob, rollout_logprob, count(own_logprob) OVER () AS num_compared"
        f" FROM tokens) WHERE {_MISMATCH} > limits.logprob_tolerance)",
        "Where engine and trainer differ beyond the tolerance, they do so in both directions.",
        "A truncation (top_p, top_k, min_p) that one of them did not apply: each token is off by "
        "the log of the mass cut away.",
    ),
    Rule(
        "edges_match",
        "batch",
        "window",
        f"(SELECT coalesce(greatest(median({_MISMATCH}) FILTER (is_first),"
        f" median({_MISMATCH}) FILTER (is_last)), 0) FROM tokens)",
        "Half of the segments' first tokens, and of their last ones, are within the tolerance.",
        "A log-probability lost or guessed at one place of each answer, which long answers hide.",
        maximum="logprob_tolerance",
    ),
    Rule(
        "own_version_outliers",
        "warning",
        "window",
        f"(SELECT count(*) FROM tokens WHERE {_MISMATCH} > ln(limits.off_factor))",
        "No token is off by more than the factor at the version that sampled it.",
        "Single tokens that the quantile passes over: a spoilt one, or an expert that flipped.",
    ),
    Rule(
        "audit_share",
        "warning",
        "window",
        "(SELECT (count(own_logprob) < 0.01 * count(*))::INTEGER FROM tokens)",
        "At least 1 % of the tokens were compared at the version that sampled them.",
        "A verdict over a whole batch that a handful of tokens carries.",
    ),
    Rule(
        "old_moved_from_own",
        "warning",
        "window",
        "(SELECT (count(*) >= 64 AND count(*) FILTER (old_logprob <> own_logprob) = 0)::INTEGER"
        " FROM tokens WHERE weight_version < limits.old_version AND own_logprob IS NOT NULL)",
        "Under the weights trained from, stale tokens have another log-probability than under "
        "their own.",
        "Old log-probabilities computed at the sampling version: staleness that nothing corrects.",
    ),
)
