"""The probe accepts the torch engine and refuses engines that really do something else."""

import asyncio
from dataclasses import replace

import pytest
import torch

from tasks.engines.batch import Batch
from tasks.engines.probe import probe
from tasks.engines.torch_engine import TorchEngine
from tests.engine_models import VOCAB, publish


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("probed"), seed=5)


class Misreporting(Batch):
    """Draws from one distribution and reports another."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.reports = {}

    def _processed(self, entries, logits):
        drawn, reported = self.distributions(entries, logits.float())
        self.reports.update(zip(entries, reported, strict=True))
        return drawn

    def _finish(self, finished):
        for entry in finished:
            entry.logprobs[-1] = self.reports[entry][entry.token_ids[-1]].item()
        super()._finish(finished)


class RawLogprobs(Misreporting):
    """Reports the model's own log-probabilities, before temperature and truncation."""

    def distributions(self, entries, logits):
        return Batch._processed(self, entries, logits), logits.log_softmax(dim=1)


class ColdDraws(Misreporting):
    """Reports what was asked for, but draws at an eighth of the temperature."""

    def distributions(self, entries, logits):
        processed = Batch._processed(self, entries, logits)
        return Batch._processed(self, entries, logits * 8), processed


class ShiftedLogprobs(Misreporting):
    """Reports the log-probability of the neighbouring token id."""

    def distributions(self, entries, logits):
        processed = Batch._processed(self, entries, logits)
        return processed, processed.roll(1, dims=1).clamp(min=-30.0)


class NoTemperature(Batch):
    def _processed(self, entries, logits):
        hot = torch.tensor([entry.request.sampling.temperature for entry in entries])
        return super()._processed(entries, logits * hot[:, None])


class NoTopK(Batch):
    def _processed(self, entries, logits):
        temperature = torch.tensor([entry.request.sampling.temperature for entry in entries])
        return (logits.float() / temperature[:, None]).log_softmax(dim=1)


class NoTopP(TorchEngine):
    async def generate(self, request):
        sampling = replace(request.sampling, top_p=1.0)
        return await super().generate(replace(request, sampling=sampling))


class OffByOneVersion(TorchEngine):
    """Claims tokens for the version after the one it attested."""

    async def generate(self, request):
        generation = await super().generate(request)
        spans = tuple(
            replace(span, weight_version=span.weight_version + 1) for span in generation.spans
        )
        return replace(generation, spans=spans)


class NoSeed(TorchEngine):
    num_calls = 0

    async def generate(self, request):
        self.num_calls += 1
        sampling = replace(request.sampling, seed=10_000 + self.num_calls)
        return await super().generate(replace(request, sampling=sampling))


def run_probe(engine, published, **changes):
    async def main():
        await engine.update(6, published.path, published.root_hash, "wait")
        arguments = {
            "prompt_token_ids": (3, 14, 15),
            "vocab_size": VOCAB,
            "weight_version": 6,
            **changes,
        }
        return await probe(engine, **arguments)

    return asyncio.run(main())


def make(published, changed=TorchEngine):
    """A torch engine, or a subclass of it, or one whose batch is of another class."""
    engine_class = changed if issubclass(changed, TorchEngine) else TorchEngine
    engine = engine_class(
        published.path, num_slots=128, max_model_tokens=16, num_threads=1, engine_id="torch-0"
    )
    if issubclass(changed, Batch):
        engine._batch = changed(engine._batch._runner)
    return engine


def test_the_torch_engine_passes(published):
    result = run_probe(make(published), published)
    assert (result.ok, result.reason) == (True, None)
    assert all(check.ok for check in result.checks)
    assert [check.name for check in result.checks] == [
        "description",
        "well_formed",
        "weight_version",
        "processed_logprobs",
        "top_k_support",
        "top_k_mass",
        "same_seed_same_token",
        "frequencies_at_temperature_2",
        "frequencies_at_temperature_1",
        "softmax_at_temperature_1",
        "softmax_at_temperature_0.5",
        "temperature_matters",
        "top_p_renormalised",
    ]


@pytest.mark.parametrize(
    ("changed", "failed"),
    [
        (RawLogprobs, "top_k_mass"),
        (ShiftedLogprobs, "top_k_mass"),
        (ColdDraws, "frequencies_at_temperature_1"),
        (NoTemperature, "temperature_matters"),
        (NoTopK, "top_k_support"),
        (NoTopP, "top_p_renormalised"),
        (OffByOneVersion, "weight_version"),
        (NoSeed, "same_seed_same_token"),
    ],
)
def test_an_engine_that_does_something_else_is_refused(published, changed, failed):
    result = run_probe(make(published, changed), published)
    assert not result.ok
    assert failed in [check.name for check in result.checks if not check.ok]
    assert result.reason is not None
    assert result.reason.startswith("engine torch-0 fails the probe at ")


def test_a_wrong_vocabulary_or_version_is_refused(published):
    for changes in ({"vocab_size": VOCAB + 1}, {"weight_version": 7}):
        result = run_probe(make(published), published, **changes)
        assert not result.ok
        assert result.reason is not None
        assert "at description: observed vocabulary 61, weight version 6" in result.reason


def test_a_prompt_that_tells_no_temperatures_apart_is_refused(published, tmp_path):
    flat = publish(tmp_path, seed=5, initializer_range=1e-4)
    result = run_probe(make(flat), flat)
    assert not result.ok
    assert result.reason is not None
    assert "probe with another" in result.reason
