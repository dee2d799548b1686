"""Gate 2, drift: what a batch is like, against the last batches the run accepted.

Each statistic is recorded with every batch by a rule that warns where it leaves its usual range, in
either direction. Where one direction is the harmful one, a second rule stops the cycle, and only
for what is too large to be learning: a collapse or an explosion between one batch and the next
dozen's median. Both need `gates.drift_batches` accepted batches; until then they hold and say so.

Expressions see `trajectories` and `tokens` of the batch; a statistic over no rows is NULL.
"""

from schemas.expectations.rule import Drift, Rule

_REWARD = "(SELECT avg(reward) FROM trajectories)"
_ENTROPY = "(SELECT avg(entropy) FROM tokens)"
_LENGTH = "(SELECT avg(num_action_tokens) FROM trajectories)"
_TRUNCATED = "(SELECT avg((status = 'truncated')::INTEGER) FROM trajectories)"
_ZERO_VARIANCE = (
    "(SELECT avg((spread = 0)::INTEGER) FROM"
    " (SELECT max(reward) - min(reward) AS spread FROM trajectories GROUP BY group_id))"
)


def _log_w(lags: str) -> str:
    return (
        "(SELECT quantile_cont(abs(old_logprob - rollout_logprob), 0.99) FROM tokens"
        f" WHERE limits.old_version - weight_version {lags})"
    )


_LOG_W = _log_w(">= 0")

_USUAL = "lies where the last batches' values make it expected."


def _statistic(
    name: str,
    what: str,
    protects_against: str,
    counter: str,
    relative: float,
    absolute: float | str,
) -> Rule:
    drift = Drift(name, "both", 4.0, relative, absolute)
    return Rule(
        name, "warning", "window", counter, f"{what} {_USUAL}", protects_against, drift=drift
    )


RULES: tuple[Rule, ...] = (
    _statistic(
        "length_mean",
        "The mean number of action tokens",
        "Answers that grow to the cap or shrink to nothing.",
        _LENGTH,
        0.5,
        2.0,
    ),
    Rule(
        "length_explosion",
        "batch",
        "window",
        _LENGTH,
        "The mean number of action tokens has not trebled.",
        "A policy that no longer ends its answers, or an engine that no longer stops at the stop"
        " token.",
        drift=Drift("length_mean", "up", 8.0, 2.0, 16.0),
    ),
    _statistic(
        "truncated_share",
        "The share of truncated rollouts",
        "A cap that has become too short.",
        _TRUNCATED,
        0.5,
        0.15,
    ),
    Rule(
        "truncation_surge",
        "batch",
        "window",
        _TRUNCATED,
        "The share of truncated rollouts has not risen by half of all.",
        "Answers that run into the cap together: their rewards say nothing of what they say.",
        drift=Drift("truncated_share", "up", 8.0, 0.0, 0.5),
    ),
    _statistic(
        "reward_mean",
        "The mean reward",
        "A scorer that changed, or a policy that found a way around it.",
        _REWARD,
        0.3,
        "reward_step",
    ),
    Rule(
        "reward_collapse",
        "batch",
        "window",
        _REWARD,
        "The mean reward has not fallen by most of what it was.",
        "Training on, when scorer, template or policy broke.",
        drift=Drift("reward_mean", "down", 8.0, 0.7, "reward_step"),
    ),
    _statistic(
        "entropy_mean",
        "The mean entropy of the sampled distributions",
        "A policy that stops exploring, or drifts into noise.",
        _ENTROPY,
        0.5,
        0.05,
    ),
    Rule(
        "entropy_collapse",
        "batch",
        "window",
        _ENTROPY,
        "The mean entropy has not fallen to a tenth of what it was.",
        "A policy that collapsed onto one answer and cannot learn its way back.",
        drift=Drift("entropy_mean", "down", 8.0, 0.9, 0.05),
    ),
    _statistic(
        "zero_variance_share",
        "The share of groups whose rewards are all alike",
        "Groups that cost sampling and give no gradient.",
        _ZERO_VARIANCE,
        0.5,
        0.3,
    ),
    _statistic(
        "log_w_p99",
        "The 99 % quantile of |log w|",
        "Sampling and training that drift apart.",
        _LOG_W,
        2.0,
        0.05,
    ),
    Rule(
        "log_w_explosion",
        "batch",
        "window",
        _LOG_W,
        "The 99 % quantile of |log w| has not quadrupled.",
        "Importance weights of which a few tokens make all of the gradient.",
        drift=Drift("log_w_p99", "up", 8.0, 3.0, 1.0),
    ),
    _statistic(
        "log_w_p99_lag_0",
        "The same over tokens of the newest version, where only rounding differs,",
        "A mismatch between engine and trainer that grows below the tolerance.",
        _log_w("= 0"),
        4.0,
        "rounding_step",
    ),
    _statistic(
        "log_w_p99_lag_1",
        "The same over tokens one version behind",
        "Steps that move the policy further than they used to.",
        _log_w("= 1"),
        2.0,
        0.05,
    ),
    _statistic(
        "log_w_p99_lag_2_up",
        "The same over tokens two versions behind or more",
        "Staleness that the policy has outrun.",
        _log_w(">= 2"),
        2.0,
        0.05,
    ),
)
