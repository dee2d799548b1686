"""Prove from outside that an engine draws from the distribution it reports.

The trick is a hot, truncated distribution. With top_k = 5 at temperature 2, the highest that vLLM
takes, all five most probable tokens show up within some hundred draws, and what they report gives
every other distribution over them: log p_T = log-softmax(2 / T · log p_2). Nothing about the engine
is believed but the protocol. The price is some hundreds of one-token requests at attach time.

The prompt's next token must be uncertain enough that five tokens are drawn and that temperatures
0.5 and 1 differ; one that does not tell them apart is refused rather than passed.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.engines.protocol import Generation, Request, RolloutEngine, Sampling

_TOP_K = 5
_HOT_TEMPERATURE = 2.0
_NUM_SEEDS = 96
# The fifth token may be rare: draws go on until it is seen. One of probability 0.01 is missed by
# this many rounds of 96 in 0.99^768 = 4e-4 of the probes.
_MAX_ROUNDS = 8
# Chi-square quantile at 4 degrees of freedom that chance exceeds once in a million probes.
_CHI_SQUARE_LIMIT = 33.4


@dataclass(frozen=True)
class ProbeCheck:
    """One statement about the engine, what was observed and what was expected."""

    name: str
    ok: bool
    observed: str
    expected: str


@dataclass(frozen=True)
class ProbeResult:
    """All checks. `reason` is a sentence naming the first that failed, None if none did."""

    engine_id: str
    ok: bool
    reason: str | None
    checks: tuple[ProbeCheck, ...]
    seconds: float


async def probe(
    engine: RolloutEngine,
    *,
    prompt_token_ids: tuple[int, ...],
    vocab_size: int,
    weight_version: int,
    tolerance: float = 0.002,
) -> ProbeResult:
    """Sample one-token continuations of a fixed prompt and check every report against the others.

    Args:
        engine: holds `weight_version`, which it has attested.
        prompt_token_ids: a prompt whose next token is uncertain.
        vocab_size: the tokenizer's.
        tolerance: allowed error of a log-probability in nats. The default suits float32;
        batch-dependent
            bf16 logits need about 0.05.
    """
    started_s = time.perf_counter()
    hot: list[Generation] = []
    for first_seed in range(0, _MAX_ROUNDS * _NUM_SEEDS, _NUM_SEEDS):
        hot += await _draws(engine, prompt_token_ids, _HOT_TEMPERATURE, 1.0, first_seed)
        if len({g.token_ids for g in hot}) >= _TOP_K:
            break
    warm = await _draws(engine, prompt_token_ids, 1.0, top_p=1.0)
    cold = await _draws(engine, prompt_token_ids, 0.5, top_p=1.0)
    again = await _draws(engine, prompt_token_ids, _HOT_TEMPERATURE, top_p=1.0)
    every = [*hot, *warm, *cold, *again]
    checks = [
        _description(engine, vocab_size, weight_version),
        _well_formed(every, vocab_size),
        _versions(every, weight_version),
        _check("processed_logprobs", engine.describe().logprobs_mode, "processed_logprobs"),
    ]
    if all(check.ok for check in checks):
        checks += _support(hot)
    if all(check.ok for check in checks):
        checks.append(_repeatable(hot, again, tolerance))
        for temperature, generations in ((_HOT_TEMPERATURE, hot), (1.0, warm)):
            predicted = _at_temperature(_reported(hot), temperature)
            checks.append(_frequencies(generations, predicted, temperature))
        checks += _temperatures(hot, warm, cold, tolerance)
        nucleus_top_p, nucleus = _nucleus(hot)
        small = await _draws(engine, prompt_token_ids, _HOT_TEMPERATURE, top_p=nucleus_top_p)
        checks.append(_renormalised(small, nucleus, tolerance))
    failed = next((check for check in checks if not check.ok), None)
    engine_id = engine.describe().engine_id
    reason = failed and (
        f"engine {engine_id} fails the probe at {failed.name}: "
        f"observed {failed.observed}, expected {failed.expected}."
    )
    seconds = time.perf_counter() - started_s
    return ProbeResult(engine_id, failed is None, reason, tuple(checks), seconds)


async def _draws(
    engine: RolloutEngine,
    prompt: tuple[int, ...],
    temperature: float,
    top_p: float,
    first_seed: int = 0,
) -> list[Generation]:
    def request(seed: int) -> Request:
        sampling = Sampling(temperature, top_p, _TOP_K, min_p=0.0, max_tokens=1, seed=seed)
        return Request(f"probe-{temperature}-{top_p}-{seed}", prompt, sampling, stop_token_ids=())

    seeds = range(first_seed, first_seed + _NUM_SEEDS)
    return await asyncio.gather(*(engine.generate(request(seed)) for seed in seeds))


def _check(name: str, observed: object, expected: object) -> ProbeCheck:
    return ProbeCheck(name, observed == expected, str(observed), str(expected))


def _bound(name: str, observed: float, limit: float, what: str) -> ProbeCheck:
    return ProbeCheck(name, observed <= limit, f"{what} {observed:.3g}", f"at most {limit:.3g}")


def _description(engine: RolloutEngine, vocab_size: int, weight_version: int) -> ProbeCheck:
    described = engine.describe()
    return _check(
        "description",
        f"vocabulary {described.vocab_size}, weight version {described.weight_version}",
        f"vocabulary {vocab_size}, weight version {weight_version}",
    )


def _well_formed(generations: Sequence[Generation], vocab_size: int) -> ProbeCheck:
    bad = [
        f"tokens {g.token_ids}, logprobs {g.logprobs}, finish reason {g.finish_reason}"
        for g in generations
        if len(g.token_ids) != 1
        or len(g.logprobs) != 1
        or g.finish_reason != "length"
        or not 0 <= g.token_ids[0] < vocab_size
        or not (math.isfinite(g.logprobs[0]) and g.logprobs[0] <= 0)
    ]
    expected = "one token of the vocabulary with a finite logprob ≤ 0, ended by length"
    return ProbeCheck("well_formed", not bad, bad[0] if bad else expected, expected)


def _versions(generations: Sequence[Generation], weight_version: int) -> ProbeCheck:
    seen = {
        (span.start, span.end, span.weight_version, span.kv_version_min)
        for g in generations
        for span in g.spans
    }
    return _check("weight_version", sorted(seen), sorted([(0, 1, weight_version, weight_version)]))


def _reported(generations: Sequence[Generation]) -> dict[int, float]:
    """Reported log-probability by token, at its first draw."""
    reported: dict[int, float] = {}
    for g in generations:
        reported.setdefault(g.token_ids[0], g.logprobs[0])
    return reported


def _support(hot: Sequence[Generation]) -> list[ProbeCheck]:
    reported = _reported(hot)
    mass_error = abs(sum(math.exp(logprob) for logprob in reported.values()) - 1)
    return [
        _check("top_k_support", f"{len(reported)} distinct tokens", f"{_TOP_K} distinct tokens"),
        _bound("top_k_mass", mass_error, 1e-3, "distance of the summed probabilities from 1"),
    ]


def _frequencies(
    generations: Sequence[Generation], logprobs: dict[int, float], temperature: float
) -> ProbeCheck:
    """Pearson's statistic of the drawn tokens, small cells pooled until each expects five draws."""
    counts = Counter(g.token_ids[0] for g in generations)
    statistic = pooled_count = pooled_mean = 0.0
    for token, logprob in sorted(logprobs.items(), key=lambda item: item[1]):
        pooled_count += counts[token]
        pooled_mean += len(generations) * math.exp(logprob)
        if pooled_mean >= 5:
            statistic += (pooled_count - pooled_mean) ** 2 / pooled_mean
            pooled_count = pooled_mean = 0.0
    name = f"frequencies_at_temperature_{temperature:g}"
    return _bound(name, statistic, _CHI_SQUARE_LIMIT, "chi-square of the draws")


def _repeatable(
    hot: Sequence[Generation], again: Sequence[Generation], tolerance: float
) -> ProbeCheck:
    pairs = zip(hot[: len(again)], again, strict=True)
    num_changed = sum(a.token_ids != b.token_ids for a, b in pairs)
    reported = _reported(hot)
    drift = max(abs(g.logprobs[0] - reported[g.token_ids[0]]) for g in hot)
    # A draw may sit on the edge between two tokens; more than one of them is not rounding.
    return ProbeCheck(
        "same_seed_same_token",
        num_changed <= 1 and drift <= tolerance,
        f"{num_changed} changed tokens, logprob drift {drift:.3g}",
        f"at most 1 changed token, logprob drift at most {tolerance:.3g}",
    )


def _temperatures(
    hot: Sequence[Generation],
    warm: Sequence[Generation],
    cold: Sequence[Generation],
    tolerance: float,
) -> list[ProbeCheck]:
    """Reports at temperatures 1 and 0.5 follow from the hot ones, and differ from each other."""
    checks = []
    for temperature, generations in ((1.0, warm), (0.5, cold)):
        predicted = _at_temperature(_reported(hot), temperature)
        error = max(
            abs(g.logprobs[0] - predicted.get(g.token_ids[0], -math.inf)) for g in generations
        )
        name = f"softmax_at_temperature_{temperature:g}"
        checks.append(_bound(name, error, tolerance, "largest logprob error"))
    at_1, at_half = _reported(warm), _reported(cold)
    shift = max((abs(at_1[t] - at_half[t]) for t in at_1.keys() & at_half.keys()), default=0.0)
    expected = f"at least {2 * tolerance:.3g} (if the prompt leaves no doubt, probe with another)"
    shown = f"largest logprob shift {shift:.3g}"
    checks.append(ProbeCheck("temperature_matters", shift >= 2 * tolerance, shown, expected))
    return checks


def _at_temperature(reported: dict[int, float], temperature: float) -> dict[int, float]:
    """The log-probabilities at another temperature, by softmax over the same tokens."""
    scaled = {
        token: logprob * _HOT_TEMPERATURE / temperature for token, logprob in reported.items()
    }
    top = max(scaled.values())
    log_total = top + math.log(sum(math.exp(value - top) for value in scaled.values()))
    return {token: value - log_total for token, value in scaled.items()}


def _nucleus(hot: Sequence[Generation]) -> tuple[float, dict[int, float]]:
    """A top_p that keeps three tokens with room on both sides, and their renormalised logprobs."""
    ordered = sorted(_reported(hot).items(), key=lambda item: -item[1])
    probs = [math.exp(logprob) for _, logprob in ordered]
    mass = sum(probs[:3])
    kept = {token: logprob - math.log(mass) for token, logprob in ordered[:3]}
    return mass - probs[2] / 2, kept


def _renormalised(
    small: Sequence[Generation], nucleus: dict[int, float], tolerance: float
) -> ProbeCheck:
    error = max(abs(g.logprobs[0] - nucleus.get(g.token_ids[0], -math.inf)) for g in small)
    return _bound("top_p_renormalised", error, tolerance, "largest logprob error")
