"""A real vLLM server: recomputed, updated in flight, and refused where it lies."""

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from schemas.config import SamplingSection
from tasks.engines.canary import Canary
from tasks.engines.fleet import Fleet
from tasks.engines.probe import probe
from tasks.engines.protocol import EngineLost, EngineTimeout, Request, Sampling
from tasks.recorder import Recorder
from tasks.rollout import RolloutContext, _sample_turn
from tasks.weights.folders import manifest_text, sealed
from tests.engine_models import VOCAB, prompts, recomputed_logprobs
from tests.vllm_world import (
    CANARY,
    MAX_MODEL_TOKENS,
    SHAPE,
    TOLERANCE,
    Version,
    cached_logprobs,
    engine_at,
    largest_error,
    num_running,
    update,
    update_in_flight,
)

pytestmark = pytest.mark.vllm

PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=64, seed=0)
LONG = 3500
"""Tokens of a request that an update must meet; a busy server reports what runs seconds late."""

PROMPT = tuple(range(1, 33))


def with_engine(url, versions, work, **settings):
    """Runs `await work(engine)` on a client that serves version 0."""

    async def main():
        engine = engine_at(url, versions[0], **settings)
        try:
            await engine.connect()
            attestation = await update(engine, versions[0])
            assert attestation.ok, attestation.reason
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def request(index: int = 0, **sampling) -> Request:
    return Request(f"r{index}", PROMPT, replace(PLAIN, seed=index, **sampling), ())


def test_it_passes_the_probe(url, versions):
    result = with_engine(
        url,
        versions,
        lambda engine: probe(
            engine, prompt_token_ids=PROMPT, vocab_size=SHAPE["vocab_size"], weight_version=0
        ),
    )
    assert (result.ok, result.reason) == (True, None)


@pytest.mark.parametrize(
    "changes",
    [{"temperature": 1.0}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 7, "temperature": 1.4}],
    ids=str,
)
def test_every_logprob_is_recomputed_from_the_publication(url, versions, changes):
    asked = [
        Request(f"r{i}", tokens, replace(PLAIN, seed=i, **changes), (3,))
        for i, tokens in enumerate(prompts(64))
    ]

    async def work(engine):
        return await asyncio.gather(*(engine.generate(each) for each in asked))

    generations = with_engine(url, versions, work)
    errors = [
        largest_error(recomputed_logprobs(versions[0].model, each, g.token_ids), g)
        for each, g in zip(asked, generations, strict=True)
    ]
    assert max(errors) <= TOLERANCE
    assert {g.finish_reason for g in generations} == {"stop", "length"}
    for g in generations:
        assert (g.token_ids[-1] == 3) == (g.finish_reason == "stop") and 3 not in g.token_ids[:-1]
        assert (g.spans[0].start, g.spans[-1].end) == (0, len(g.token_ids))
        assert g.engine_id == "vllm-0" and g.load is not None and g.decode_s > 0


def test_truncated_logprobs_are_off_by_the_mass_cut_away(url, versions):
    """The wrong explanation would have been seen: not renormalised, delta is about log 0.9."""

    async def work(engine):
        return await engine.generate(request(max_tokens=200, top_p=0.9))

    generation = with_engine(url, versions, work)
    whole = recomputed_logprobs(versions[0].model, request(), generation.token_ids)
    delta = whole - np.array(generation.logprobs)
    assert np.log(0.9) - TOLERANCE <= delta.min() and np.median(delta) < -0.05


@pytest.mark.parametrize("prefix_cache", ["salt", "clear"])
@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_an_update_in_the_middle_of_eight_requests(url, versions, mode, prefix_cache):
    """Each token is recomputed under the weights, and over the cache, that it names."""
    new = versions[1]
    section = SamplingSection(temperature=1.0, max_tokens=LONG)

    async def work(engine):
        fleet = Fleet([engine], patience_s=1.0)
        fleet.admit(engine)
        context = RolloutContext(
            fleet, environment=None, renderer=SimpleNamespace(stop_token_ids=()), run_seed=1
        )  # type: ignore[arg-type]
        recorders: dict[int, Recorder] = {}

        async def ask(index):
            recorder = recorders[index] = Recorder(f"t{index}")
            recorder.context("prompt", 0, list(PROMPT))
            return await _sample_turn(context, recorder, section, (0, index, 0))

        attestation, turns = await update_in_flight(engine, ask, new, mode)
        return attestation, turns, [recorders[index] for index in range(8)]

    attestation, turns, recorders = with_engine(url, versions, work, prefix_cache=prefix_cache)
    assert attestation.ok, attestation.reason
    assert attestation.canary_max_abs_diff <= TOLERANCE
    old_cache = mode == "keep" and prefix_cache == "salt"
    for (action, reason), recorder in zip(turns, recorders, strict=True):
        prompt, *segments = recorder.segments
        assert prompt["kind"] == "prompt" and reason == "length"
        # Nothing lost, nothing twice: segments, turn and requests all hold the same tokens.
        assert len(action) == LONG == sum(r["num_output_tokens"] for r in recorder.requests)
        assert [t for s in segments for t in s["token_ids"]] == action
        assert [s["start_position"] for s in segments] == list(
            np.cumsum([len(PROMPT), *(len(s["token_ids"]) for s in segments)])[:-1]
        )
        named = [(s["weight_version"], s["kv_version_min"]) for s in segments]
        if mode == "wait":
            assert named == [(0, 0)]
        else:
            assert named == [(0, 0), (1, 0 if old_cache else 1)]
        parts = [r["finish_reason"] for r in recorder.requests]
        assert parts == (["abort", "length"] if mode == "abort" else ["length"])
        check_tokens(versions, segments, action, old_cache)


def check_tokens(versions, segments, action, old_cache):
    """Recomputes all log-probabilities of a turn; with `old_cache` over the cache it kept."""
    logprobs = np.array([x for s in segments for x in s["rollout_logprobs"]])
    swap = len(segments[0]["token_ids"])
    whole = [recomputed_logprobs(v.model, request(), action) for v in versions]
    after = whole[1]
    if old_cache:
        models = [versions[0].model] * swap + [versions[1].model] * (LONG - swap)
        after = cached_logprobs(models, request(), action)
    assert np.abs(whole[0] - logprobs)[:swap].max() <= TOLERANCE
    if swap < LONG:
        assert np.abs(after - logprobs)[swap:].max() <= TOLERANCE
        # The other explanation is far off, so the check could have failed.
        assert np.abs(whole[0] - logprobs)[swap:].max() > 0.5
    if old_cache:
        assert np.abs(whole[1] - logprobs)[swap:].max() > 0.02


def test_a_shared_prompt_is_cached_within_a_version_and_not_across(url, versions):
    long_prompt = tuple(np.random.default_rng(5).integers(0, VOCAB, 400).tolist())

    async def work(engine):
        first = await engine.generate(Request("a", long_prompt, PLAIN, ()))
        second = await engine.generate(Request("b", long_prompt, PLAIN, ()))
        await update(engine, versions[1])
        third = await engine.generate(Request("c", long_prompt, PLAIN, ()))
        return first, second, third

    first, second, third = with_engine(url, versions, work)
    assert [g.num_cached_tokens > 0 for g in (first, second, third)] == [False, True, False]
    assert [g.cached_version_min for g in (first, second, third)] == [None, 0, None]
    asked = Request("b", long_prompt, PLAIN, ())
    expected = recomputed_logprobs(versions[0].model, asked, second.token_ids)
    assert largest_error(expected, second) <= TOLERANCE


def damaged(version: Version, folder: Path, change) -> Path:
    """A copy of a publication with something changed."""
    shutil.copytree(version.path, folder)
    change(folder)
    return folder


def flip_a_byte(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)


def claim_another_parent(folder: Path) -> None:
    file = folder / "rollhouse-manifest.json"
    file.write_text(manifest_text(sealed(json.loads(file.read_text()) | {"parent": 7})))


@pytest.mark.parametrize(
    ("change", "why"),
    [(flip_a_byte, "does not have the hash"), (claim_another_parent, "on parent 7, not")],
)
def test_a_damaged_publication_is_refused(url, versions, tmp_path, change, why):
    folder = damaged(versions[1], tmp_path / "copy", change)

    async def work(engine):
        attestation = await engine.update(1, folder, versions[1].publication.root_hash, "wait")
        with pytest.raises(EngineLost, match="has not attested"):
            await engine.generate(request())
        return attestation

    attestation = with_engine(url, versions, work)
    assert not attestation.ok and why in attestation.reason
    # The server still holds, and says it holds, what it held before.
    assert attestation.root_hash == versions[0].publication.root_hash


def test_other_computations_with_the_right_hashes_are_refused(url, versions, tmp_path):
    """A server that loaded the published values and computes something else with them."""
    model_dir = tmp_path / "model"
    shutil.copytree(versions[0].path, model_dir)
    config = json.loads((model_dir / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 4
    (model_dir / "config.json").write_text(json.dumps(config))

    async def work(engine):
        engine._canary = Canary(model_dir, CANARY, TOLERANCE)
        return await update(engine, versions[1])

    attestation = with_engine(url, versions, work)
    assert not attestation.ok and "fixed sequence are off by up to" in attestation.reason
    assert attestation.root_hash == versions[1].publication.root_hash
    assert attestation.canary_max_abs_diff > TOLERANCE


@pytest.mark.parametrize("label", ["7", "default", "another run", "a version before"])
def test_weights_that_were_not_attested_end_the_traffic(url, versions, label):
    """From the future, of the server's start, of another controller, or stale."""

    async def work(engine):
        stale = engine._label(0)
        assert (await update(engine, versions[1])).ok
        named = {"another run": "0f0f0f0f-1", "a version before": stale}.get(label, label)
        await engine._http.post("/update_weight_version", {"new_version": named})
        fleet = Fleet([engine], patience_s=0.1)
        fleet.admit(engine)
        with pytest.raises(EngineLost, match="No engine has served"):
            await fleet.generate(request())
        return fleet.reason_out(engine), named

    reason, named = with_engine(url, versions, work)
    if label == "a version before":
        assert "a token of a version before 1" in reason
    else:
        assert f"labelled ['{named}']" in reason


def test_an_update_that_a_killed_controller_left_open_is_closed(url, versions):
    async def work(engine):
        await engine._http.post("/pause", mode="keep")
        await engine._http.post("/start_weight_update")
        await engine.connect()
        attestation = await update(engine, versions[1], "abort")
        return attestation, await engine.generate(request(max_tokens=4))

    attestation, generation = with_engine(url, versions, work)
    assert attestation.ok and generation.spans[0].weight_version == 1


def test_an_answer_from_before_the_attachment_leaves_the_new_one_in_traffic(url, versions):
    async def work(engine):
        old = asyncio.create_task(engine.generate(request(max_tokens=LONG)))
        while await num_running(engine._http) == 0:
            await asyncio.sleep(0.01)
        await engine.connect()
        assert (await update(engine, versions[0], "keep")).ok
        with pytest.raises(EngineLost, match=r"under version 0 .* labelled"):
            await old
        return await engine.generate(request(max_tokens=4))

    assert with_engine(url, versions, work).spans[0].weight_version == 0


def test_a_cache_from_before_the_attachment_is_not_used(url, versions):
    """Another run's version 0 has the same number and other keys and values."""
    long_prompt = Request("a", tuple(range(1, 61)) * 6, PLAIN, ())

    async def work(engine):
        first = [await engine.generate(long_prompt) for _ in range(2)]
        await engine.connect()
        assert (await update(engine, versions[0])).ok
        return [*first, await engine.generate(long_prompt)]

    cached = [g.num_cached_tokens > 0 for g in with_engine(url, versions, work)]
    assert cached == [False, True, False]


def test_the_length_is_cut_to_what_fits(url, versions):
    async def work(engine):
        prompt = tuple(i % 60 for i in range(MAX_MODEL_TOKENS - 8))
        return await engine.generate(Request("a", prompt, replace(PLAIN, max_tokens=500), ()))

    generation = with_engine(url, versions, work)
    assert (len(generation.token_ids), generation.finish_reason) == (8, "length")


def test_a_cancelled_request_leaves_the_server(url, versions):
    async def work(engine):
        task = asyncio.create_task(engine.generate(request(max_tokens=LONG)))
        while await num_running(engine._http) == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.2)
        return await num_running(engine._http)

    assert with_engine(url, versions, work) == 0


def test_a_request_that_takes_too_long_is_no_lost_engine(url, versions):
    async def work(engine):
        with pytest.raises(EngineTimeout, match="took longer than 1 s"):
            await engine.generate(request(max_tokens=LONG))
        return await engine.generate(request(max_tokens=2))

    assert len(with_engine(url, versions, work, request_timeout_s=1.0).token_ids) == 2


def test_the_rate_limit_holds(url, versions):
    async def work(engine):
        loop = asyncio.get_running_loop()
        started = loop.time()
        await asyncio.gather(*(engine.generate(request(i, max_tokens=1)) for i in range(11)))
        return loop.time() - started

    assert with_engine(url, versions, work, requests_per_s=10.0) >= 0.95


@pytest.mark.parametrize("colocated", [False, True])
def test_a_paused_server_answers_after_it_resumes(url, versions, colocated):
    async def work(engine):
        await engine.pause()
        task = asyncio.create_task(engine.generate(request(max_tokens=4)))
        await asyncio.sleep(0.3)
        assert not task.done()
        await engine.resume()
        return await task

    assert len(with_engine(url, versions, work, colocated=colocated).token_ids) == 4


def test_a_server_that_is_not_what_the_run_needs_is_refused(url, versions):
    async def connect(**changes):
        engine = engine_at(url, versions[0])
        for name, value in changes.items():
            setattr(engine, name, value)
        try:
            with pytest.raises(ValueError) as error:
                await engine.connect()
        finally:
            await engine.close()
        return str(error.value)

    more = 2 * MAX_MODEL_TOKENS
    assert f"set --max-model-len {more}" in asyncio.run(connect(_max_model_tokens=more))
    assert "set --dtype bfloat16" in asyncio.run(connect(_compute_dtype="bfloat16"))


def test_nobody_at_the_url_is_said_so(versions):
    async def connect():
        engine = engine_at("http://127.0.0.1:9", versions[0])
        with pytest.raises(EngineLost, match="cannot be reached"):
            await engine.connect()
        await engine.close()

    asyncio.run(connect())
