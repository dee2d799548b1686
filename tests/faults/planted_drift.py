"""Batches unlike the run's last ones, for gate 2 to warn of, and to refuse where it is harm."""

from tests.faults.planted import Faults
from tests.faults.spoilable import Spoilable

FAULTS = Faults()


def after(batch: Spoilable, statistic: str, value: float) -> None:
    """Ten batches around `value`, by a hundredth of it up and down."""
    batch.history = {statistic: [value * (1 + 0.01 * (-1) ** i) for i in range(10)]}


@FAULTS.of(2, "length_mean", "warning")
def answers_half_as_long(batch):
    after(batch, "length_mean", 60.0)


@FAULTS.of(2, "length_explosion", "batch")
def answers_five_times_as_long(batch):
    after(batch, "length_mean", 5.0)


@FAULTS.of(2, "truncated_share", "warning")
def more_answers_truncated(batch):
    after(batch, "truncated_share", 0.0)
    for r in batch.rollouts[::4]:
        r.trajectory["status"] = "truncated"


@FAULTS.of(2, "truncation_surge", "batch")
def nearly_all_answers_truncated(batch):
    after(batch, "truncated_share", 0.05)
    for r in batch.rollouts[1:]:
        r.trajectory["status"] = "truncated"


@FAULTS.of(2, "reward_mean", "warning")
def reward_leaps_up(batch):
    after(batch, "reward_mean", 0.2)


@FAULTS.of(2, "reward_collapse", "batch")
def reward_collapses(batch):
    after(batch, "reward_mean", 0.6)
    for r in batch.rollouts:
        r.trajectory["reward"] *= r is batch.rollouts[1]


@FAULTS.of(2, "entropy_mean", "warning")
def entropy_leaps_up(batch):
    after(batch, "entropy_mean", 0.8)


@FAULTS.of(2, "entropy_collapse", "batch")
def entropy_collapses(batch):
    after(batch, "entropy_mean", 2.5)
    for score in batch.scores:
        score["entropies"] = [0.05] * len(score["entropies"])


@FAULTS.of(2, "zero_variance_share", "warning")
def most_groups_without_variance(batch):
    after(batch, "zero_variance_share", 0.2)
    for r in batch.rollouts[: 4 * 6]:
        r.trajectory["reward"] = 1.0


@FAULTS.of(2, "log_w_p99", "warning")
def log_w_grows(batch):
    after(batch, "log_w_p99", 0.005)


@FAULTS.of(2, "log_w_explosion", "batch")
def log_w_explodes(batch):
    after(batch, "log_w_p99", 0.1)
    for r in batch.rollouts[24:28]:
        for action in batch.actions(r):
            batch.score(action)["old_logprobs"] = [
                x - 2.0 for x in batch.score(action)["old_logprobs"]
            ]


@FAULTS.of(2, "log_w_p99_lag_0", "warning")
def rounding_error_grows(batch):
    after(batch, "log_w_p99_lag_0", 0.0001)
    for action in batch.actions():
        if action["weight_version"] == 3:
            action["rollout_logprobs"] = [x - 0.001 for x in action["rollout_logprobs"]]


@FAULTS.of(2, "log_w_p99_lag_1", "warning")
def steps_twice_as_long(batch):
    after(batch, "log_w_p99_lag_1", 0.02)


@FAULTS.of(2, "log_w_p99_lag_2_up", "warning")
def staleness_that_the_policy_outran(batch):
    after(batch, "log_w_p99_lag_2_up", 0.02)
    batch.limits |= {"max_lag": 2}
    for r in batch.rollouts[24:]:
        for action in batch.actions(r):
            action["weight_version"] = action["kv_version_min"] = 1
