"""Two hundred clean batches of runs that learn: no gate stops one or takes a rollout from it."""

import pytest

from tasks.history import STATISTICS
from tests.factories import GATE2_LIMITS
from tests.gate_judgements import gate1, gate2
from tests.healthy_learning import BATCHES, FAMILIES, MAX_TOKENS, clean_batches

NUM_HISTORY = GATE2_LIMITS["drift_batches"]


@pytest.mark.parametrize("name", FAMILIES)
def test_gate_1_passes_every_window_of_a_run_that_learns(name: str):
    family = FAMILIES[name]
    batches = list(clean_batches(family))
    for start in range(0, BATCHES, 5):
        window = batches[start : start + 5]
        judgement = gate1(
            [rollout for clean in window for rollout in clean.rollouts],
            published_version=window[-1].batch - 1,
            max_lag=family.max_lag,
            group_size=family.size,
            max_tokens=MAX_TOKENS,
            max_model_tokens=1024,
        )
        assert judgement.ok and not judgement.faults, judgement.reason
        assert not judgement.warnings


@pytest.mark.parametrize("name", FAMILIES)
def test_gate_2_passes_every_batch_of_a_run_that_learns(name: str):
    family = FAMILIES[name]
    history: dict[str, list[float]] = {statistic: [] for statistic in STATISTICS}
    warned: list[tuple[int, str]] = []
    judged = 0
    for clean in clean_batches(family):
        judgement = gate2(
            clean.rollouts,
            clean.scores,
            history,
            admission=10 * clean.batch,
            old_version=clean.batch - 1,
            max_lag=family.max_lag,
        )
        assert judgement.ok and not judgement.faults, (clean.batch, judgement.reason)
        warned += [(clean.batch, warning) for warning in judgement.warnings]
        for result in judgement.results:
            if result.rule in history and result.observed is not None:
                history[result.rule].append(result.observed)
            judged += result.rule == "reward_collapse" and result.expected.startswith(">=")
    assert judged == BATCHES - NUM_HISTORY, "the rest had too little history"
    # A warning that comes every few batches is read by nobody.
    assert len(warned) <= 0.1 * BATCHES, warned
