"""Gate 1, rules of a trajectory and of its group.

Expressions see `t`, a row of trajectories with sums over its segments (`segment_tokens`,
`segment_action_tokens`, `segment_version_min`, `segment_version_max`, `segment_sequences`), over
its requests (`num_requests`, `request_tokens`, `last_request_finish`, `num_drifted`,
`num_unlike_prompts`, `num_unlike_finishes`) and over its group (`group_samples`, `group_tasks`,
`group_opening`), its own `opening`, `num_twins`, `surprisal` and `expected_seed`; and `limits`.
"""

from schemas.expectations.rule import Rule

RULES: tuple[Rule, ...] = (
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
        "(t.status = 'truncated') IS DISTINCT FROM (t.finish_reason IN ('length', 'context'))"
        " OR (t.finish_reason = 'length') IS DISTINCT FROM"
        " (t.status = 'truncated' AND t.last_request_finish IS NOT DISTINCT FROM 'length')"
        " OR (t.status = 'completed' AND t.last_request_finish IS DISTINCT FROM 'stop')",
        "A trajectory is truncated exactly when a length cap ended it, as its last request says.",
        "A truncated answer trained as a complete one, or a complete one as truncated.",
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
        "finishes_agree",
        "row",
        "trajectory",
        "t.num_unlike_finishes",
        "A request that says stop ended with a stop token, and one that says length at a cap.",
        "A finish reason that was guessed, or a cap that was not the configured one.",
    ),
    Rule(
        "prompts_extend",
        "row",
        "trajectory",
        "t.num_unlike_prompts",
        "Each request sent exactly as many tokens as are recorded before its action.",
        "A context that was re-encoded from text on the way, so the policy saw other tokens.",
    ),
    Rule(
        "sequences_agree",
        "row",
        "trajectory",
        "t.num_sequences IS DISTINCT FROM t.segment_sequences"
        " OR t.num_drifted IS DISTINCT FROM t.num_sequences - 1",
        "A new sequence opens exactly where a prompt did not continue the one before it.",
        "A gradient in a context that the policy never saw.",
    ),
    Rule(
        "no_retokenization",
        "warning",
        "trajectory",
        "t.num_drifted",
        "Every prompt continues what was sampled, token by token.",
        "A harness that re-encodes text: each turn becomes a sequence of its own.",
    ),
    Rule(
        "finished_has_actions",
        "row",
        "trajectory",
        "t.status IN ('completed', 'truncated')"
        " AND (t.num_action_tokens = 0 OR t.num_requests = 0)",
        "A finished rollout sampled tokens, in an engine request.",
        "Padding rows that fill up a short group.",
    ),
    Rule(
        "id_agrees",
        "row",
        "trajectory",
        "t.trajectory_id IS DISTINCT FROM"
        " printf('%08d-%03d-%d', t.group_id, t.sample_index, t.attempt)",
        "A trajectory's id spells its group, sample and attempt.",
        "A copied or renamed row that counts as another rollout.",
    ),
    Rule(
        "seed_as_derived",
        "row",
        "trajectory",
        "t.sampling.seed IS DISTINCT FROM t.expected_seed",
        "Each rollout was sampled with the seed of its place in the run.",
        "A seed that the engine chose, or a rollout copied under another id.",
    ),
    Rule(
        "content_once",
        "row",
        "trajectory",
        "t.num_twins > 0 AND t.surprisal >= 30",
        "No two rollouts agree in every token and log-probability by less than e^-30 of chance.",
        "A rollout counted twice under two ids; a short, likely answer may well be given twice.",
    ),
    Rule(
        "group_one_prompt",
        "row",
        "trajectory",
        "t.opening IS DISTINCT FROM t.group_opening",
        "All rollouts of a group begin with the prompt that most of it has.",
        "An answer beside another problem's prompt, or a template that changed within a group.",
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
)
