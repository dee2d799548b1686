"""Gate 1: what every rollout must satisfy before it can be admitted to a batch.

Expressions see `s` (segments with `previous_version`, `expected_start`, `action_tokens`, those of
the whole turn, `is_last` of its sequence, `was_forwarded`, which says that its trajectory has
actions; and of its routing, NULL without, `routing_count`, `routing_rows`, `routing_layers`,
`routing_top_k`, `routing_bytes`, `routing_item_bytes`, `routing_blank_rows`, `largest_expert`,
beside the window's `usual_layers` and `usual_top_k`), `t` (trajectories with `segment_tokens`,
`segment_action_tokens`, `segment_version_min`, `segment_version_max`, `request_tokens`,
`last_request_finish`, `group_samples`, `group_tasks`) and `limits`.
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
        "routing_shape",
        "row",
        "segment",
        "s.routing_count > 1"
        " OR s.routing_rows > len(s.token_ids)"
        " OR s.routing_item_bytes = 0"
        " OR s.routing_bytes IS DISTINCT FROM"
        " s.routing_item_bytes * s.routing_rows * s.routing_layers * s.routing_top_k"
        " OR s.routing_layers IS DISTINCT FROM"
        " CASE WHEN s.routing_count > 0 THEN coalesce(limits.num_routed_layers, s.usual_layers) END"
        " OR s.routing_top_k IS DISTINCT FROM"
        " CASE WHEN s.routing_count > 0 THEN coalesce(limits.num_experts_per_token, s.usual_top_k)"
        " END",
        "A segment's experts are rows x layers x top_k values, one row a token at most, with the"
        " layers and top_k of the model, or of the rest of the window.",
        "Experts read beside the wrong token, layer or rank.",
    ),
    Rule(
        "routing_complete",
        "row",
        "segment",
        "CASE WHEN limits.num_experts IS NULL THEN s.routing_count > 0 ELSE s.was_forwarded AND"
        " coalesce(s.routing_rows, 0) < len(s.token_ids) - s.is_last::INTEGER END",
        "If the engine reports routing, every token has a row but the last of a sequence, which may"
        " have none; if it does not, none has.",
        "A replay that routes some tokens as sampled and the rest by itself.",
    ),
    Rule(
        "routing_in_range",
        "row",
        "segment",
        "s.largest_expert >= limits.num_experts",
        "Every expert is one of the model's.",
        "Experts of another model, or bytes read as the wrong element type.",
    ),
    Rule(
        "routing_not_blank",
        "row",
        "segment",
        "CASE WHEN s.routing_top_k > 1 THEN s.routing_blank_rows END",
        "No token has expert 0 throughout: where several are chosen they differ.",
        "Missing rows written as expert 0, by an engine that allocated them and captured nothing.",
    ),
    Rule(
        "token_counts_agree",
        "row",
        "trajectory",
        "t.num_tokens IS DISTINCT FROM t.segment_tokens"
        " OR t.num_action_tokens IS DISTINCT FROM t.segment_action_tokens",
        "A trajectory's token counts are those of its segments.",
        "Segments lost between the engine and the lake.",
    ),
    Rule(
        "requests_agree",
        "row",
        "trajectory",
        "t.num_action_tokens IS DISTINCT FROM t.request_tokens",
        "A trajectory's action tokens are those its engine requests returned.",
        "Tokens that an engine never sampled, or sampled and lost.",
    ),
    Rule(
        "version_bounds_agree",
        "row",
        "trajectory",
        "t.weight_version_min IS DISTINCT FROM t.segment_version_min"
        " OR t.weight_version_max IS DISTINCT FROM t.segment_version_max",
        "A trajectory's oldest and newest versions are those of its segments.",
        "A stale rollout that admission takes for a fresh one.",
    ),
    Rule(
        "status_agrees",
        "row",
        "trajectory",
        "(t.status = 'truncated') IS DISTINCT FROM (t.finish_reason = 'length')"
        " OR (t.status = 'completed' AND t.last_request_finish IS DISTINCT FROM 'stop')",
        "A trajectory is truncated exactly when a length cap ended it, as its last request says.",
        "A truncated answer trained as a complete one.",
    ),
    Rule(
        "reward_finite",
        "row",
        "trajectory",
        "t.reward IS NOT NULL AND NOT isfinite(t.reward)",
        "No reward is NaN or infinite.",
        "One scorer fault poisoning every advantage of its group.",
    ),
    Rule(
        "reward_in_range",
        "row",
        "trajectory",
        "isfinite(t.reward) AND (t.reward < limits.reward_min OR t.reward > limits.reward_max)",
        "Every reward is inside the configured range.",
        "A scorer on another scale.",
    ),
    Rule(
        "reward_where_due",
        "row",
        "trajectory",
        "(t.status IN ('completed', 'truncated')) IS DISTINCT FROM (t.reward IS NOT NULL)",
        "A finished rollout has a reward and a failed one has none.",
        "A failure counted as a wrong answer.",
    ),
    Rule(
        "group_whole",
        "group",
        "trajectory",
        "t.group_samples IS DISTINCT FROM"
        " CASE t.split WHEN 'train' THEN limits.group_size ELSE limits.num_samples END",
        "A group has exactly as many rollouts as configured.",
        "An advantage relative to the wrong baseline.",
    ),
    Rule(
        "group_one_task",
        "group",
        "trajectory",
        "t.group_tasks IS DISTINCT FROM 1",
        "All rollouts of a group answer one task.",
        "An advantage that compares different problems.",
    ),
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
        "routing_has_segment",
        "batch",
        "window",
        "(SELECT count(*) FROM routing ANTI JOIN segments"
        " USING (trajectory_id, sequence_index, segment_index))",
        "Every routing row belongs to a recorded segment.",
        "Experts that no token was routed to.",
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
        " OR chat_template_sha256 IS DISTINCT FROM limits.chat_template_sha256)",
        "Tokenizer and chat template are those the run began with.",
        "Contexts that change meaning in mid run.",
    ),
    Rule(
        "engine_unchanged",
        "batch",
        "window",
        "(SELECT count(*) FROM trajectories WHERE engine IS DISTINCT FROM limits.engine)",
        "The engine build is the one that was probed.",
        "An engine upgraded in mid run.",
    ),
)
