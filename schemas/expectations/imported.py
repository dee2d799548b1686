"""What of gate 1 can be judged of rollouts that another framework sampled.

An import has no engine requests, no routing, no configured bounds and no published versions, so
rules about those are left out rather than passed. What a source may lack is a warning of its own:
it is counted and shown, and never filled in.
"""

from dataclasses import replace

from schemas.expectations import segments, trajectories, windows
from schemas.expectations.rule import Rule

_ACTION = "s.kind = 'action'"

_AS_AT_GATE_1 = (
    "logprobs_present",
    "logprobs_not_positive",
    "versions_monotone",
    "positions_contiguous",
    "sequence_opens_with_prompt",
    "kinds_present",
    "token_counts_agree",
    "reward_finite",
    "trajectory_once",
    "segments_have_trajectory",
    "logprobs_not_constant",
)

_BY_ID = {rule.id: rule for rule in (*segments.RULES, *trajectories.RULES, *windows.RULES)}

RULES: tuple[Rule, ...] = (
    *(_BY_ID[name] for name in _AS_AT_GATE_1),
    replace(
        _BY_ID["lengths_agree"],
        counter="s.rollout_logprobs IS NOT NULL"
        f" AND (NOT ({_ACTION}) OR len(s.rollout_logprobs) <> len(s.token_ids))",
        description="Where log-probabilities are known, every action token has one and no other"
        " token does.",
    ),
    replace(_BY_ID["group_one_task"], counter="t.group_tasks > 1"),
    Rule(
        "token_ids_recorded",
        "warning",
        "trajectory",
        "t.num_tokens IS NULL",
        "The source recorded token ids.",
        "A count of tokens that silently leaves out rollouts known as text alone.",
    ),
    Rule(
        "logprobs_recorded",
        "warning",
        "segment",
        f"{_ACTION} AND s.rollout_logprobs IS NULL",
        "The source recorded the log-probabilities of sampled tokens.",
        "A mismatch study over rollouts without a denominator.",
    ),
    Rule(
        "logprobs_unrounded",
        "warning",
        "trajectory",
        "t.logprobs_mode LIKE 'rounded%'",
        "The source recorded log-probabilities at full precision.",
        "Rounding taken for a mismatch of engines.",
    ),
    Rule(
        "versions_recorded",
        "warning",
        "segment",
        f"{_ACTION} AND s.weight_version IS NULL",
        "The source recorded which weights sampled each token.",
        "Staleness that cannot be measured.",
    ),
    Rule(
        "sampling_recorded",
        "warning",
        "trajectory",
        "t.sampling.temperature IS NULL",
        "The source recorded the sampling temperature.",
        "Log-probabilities compared across unlike distributions.",
    ),
    Rule(
        "reward_recorded",
        "warning",
        "trajectory",
        "t.reward IS NULL",
        "The source recorded a reward.",
        "A mean reward over the rollouts that happen to have one.",
    ),
)
