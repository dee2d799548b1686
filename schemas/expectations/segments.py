"""Gate 1, rules of a segment: tokens, log-probabilities, versions and places.

Expressions see `s`, a row of segments with what stands around it (`expected_start`,
`previous_version`, `action_tokens` of the whole turn, `is_last_action` of its turn, `is_last` of
its sequence, `was_forwarded`: its trajectory has actions), and `limits`.
"""

from schemas.expectations.rule import Rule

_ACTION = "s.kind = 'action'"

RULES: tuple[Rule, ...] = (
    Rule(
        "lengths_agree",
        "row",
        "segment",
        f"({_ACTION} AND len(s.rollout_logprobs) IS DISTINCT FROM len(s.token_ids))"
        f" OR (NOT {_ACTION} AND s.rollout_logprobs IS NOT NULL)",
        "Every action token has a log-probability and no other token does.",
        "A log-probability set beside the wrong token.",
    ),
    Rule(
        "logprobs_present",
        "row",
        "segment",
        "len(list_filter(coalesce(s.rollout_logprobs, []),"
        " lambda x: x IS NULL OR NOT isfinite(x)))",
        "No action token's log-probability is NULL, NaN or infinite.",
        "An importance weight without a denominator.",
    ),
    Rule(
        "logprobs_not_positive",
        "row",
        "segment",
        "len(list_filter(coalesce(s.rollout_logprobs, []), lambda x: x > 0))",
        "Every log-probability is at most 0.",
        "Logits or probabilities logged as log-probabilities.",
    ),
    Rule(
        "versions_present",
        "row",
        "segment",
        f"{_ACTION} AND (s.weight_version IS NULL OR s.kv_version_min IS NULL)",
        "Every action segment names the weights that sampled it and those behind its cache.",
        "Staleness that cannot be measured.",
    ),
    Rule(
        "versions_published",
        "row",
        "segment",
        "s.weight_version > limits.published_version",
        "No token claims weights that were not published yet.",
        "A version counter that was reset or runs ahead.",
    ),
    Rule(
        "versions_monotone",
        "row",
        "segment",
        "s.weight_version < s.previous_version OR s.kv_version_min > s.weight_version",
        "Versions never fall within a sequence, and a cache is never newer than the weights.",
        "Parts of different rollouts joined into one.",
    ),
    Rule(
        "ids_in_vocabulary",
        "row",
        "segment",
        "len(list_filter(s.token_ids, lambda x: x IS NULL OR x < 0 OR x >= limits.vocab_size))",
        "Every token id is inside the policy's vocabulary.",
        "Tokens of another tokenizer.",
    ),
    Rule(
        "positions_contiguous",
        "row",
        "segment",
        "s.start_position IS DISTINCT FROM s.expected_start",
        "Segments of a sequence follow each other without a gap or an overlap.",
        "A lost, doubled or reordered segment.",
    ),
    Rule(
        "sequence_opens_with_prompt",
        "row",
        "segment",
        "s.segment_index = 0 AND s.kind NOT IN ('prompt', 'summary')",
        "A sequence begins with the context that the policy saw.",
        "Actions without their context.",
    ),
    Rule(
        "action_within_cap",
        "row",
        "segment",
        f"{_ACTION} AND s.action_tokens > limits.max_tokens",
        "No action is longer than the sampling cap, however many segments it was split into.",
        "A cap that the engine did not apply.",
    ),
    Rule(
        "kinds_present",
        "row",
        "segment",
        "s.kind IS NULL OR s.turn_index IS NULL OR s.token_ids IS NULL",
        "Every segment says what it is, which turn it belongs to, and its tokens.",
        "Tokens that no other rule looks at.",
    ),
    Rule(
        "logprobs_plausible",
        "row",
        "segment",
        "list_min(s.rollout_logprobs) < -50",
        "No sampled token had a probability below e^-50.",
        "A marker such as -9999, or an overflowed float16, in place of a log-probability.",
    ),
    Rule(
        "logprobs_vary",
        "row",
        "segment",
        "len(s.rollout_logprobs) >= 8 AND list_min(s.rollout_logprobs) < 0"
        " AND list_min(s.rollout_logprobs) = list_max(s.rollout_logprobs)",
        "An action of eight tokens or more has more than one log-probability, unless all are 0.",
        "A mean or a default written to every token.",
    ),
    Rule(
        "versions_current",
        "row",
        "segment",
        "s.weight_version < coalesce(limits.oldest_version, 0)",
        "No version is negative, and a synchronous run samples with the newest one.",
        "A version counter that was reset, or an engine that missed an update.",
    ),
    Rule(
        "nothing_after_stop",
        "row",
        "segment",
        f"{_ACTION} AND list_has_any(CASE WHEN s.is_last_action THEN s.token_ids[:-2]"
        " ELSE s.token_ids END, limits.stop_token_ids)",
        "A stop token ends its action.",
        "Padding appended to an answer, or two answers joined.",
    ),
)
