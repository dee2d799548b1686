"""Gate 1, rules of routing: the experts that a mixture-of-experts engine reported.

Expressions see `s`, a row of segments with facts of its routing, NULL without: `routing_count`,
`routing_rows`, `routing_layers`, `routing_top_k`, `routing_bytes`, `routing_item_bytes`,
`routing_blank_rows`, `largest_expert` and `group_agreement`, beside the window's `usual_layers` and
`usual_top_k`; and `limits`.
"""

from schemas.expectations.rule import Rule

RULES: tuple[Rule, ...] = (
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
        "routing_like_group",
        "row",
        "segment",
        "s.group_agreement < 0.5",
        "Over a group's shared prompt, half of a rollout's experts or more are those that most of"
        " the group has.",
        "Routing moved by a row, or of another prompt: of the same shape and in range.",
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
)
