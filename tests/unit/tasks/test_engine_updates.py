"""Weight updates in flight, and what the engine refuses to load."""

import asyncio
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.engines.protocol import Request, VersionSpan
from tests.engine_models import (
    PLAIN,
    attached,
    generate_all,
    make_engine,
    prompts,
    publish,
    recomputed_logprobs,
    replay,
    turn_loop,
)


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("old"), seed=1)


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("new"), seed=2)


def requests(count: int, max_tokens: int = 20) -> list[Request]:
    return [
        Request(f"r{i}", prompt, replace(PLAIN, max_tokens=max_tokens, seed=i), ())
        for i, prompt in enumerate(prompts(count, seed=3))
    ]


def assert_exact(published, request, generation):
    expected = recomputed_logprobs(published.model, request, generation.token_ids)
    assert np.abs(np.array(generation.logprobs) - expected).max() <= 1e-4


def test_keep_continues_on_the_old_cache_like_a_replay(old, new):
    calls = requests(6)

    async def main():
        engine = await attached(old, version=4, num_slots=4)
        tasks = [asyncio.create_task(engine.generate(call)) for call in calls]
        await turn_loop(70)
        assert (await engine.update(5, new.path, new.root_hash, "keep")).ok
        return await asyncio.gather(*tasks)

    done = asyncio.run(main())
    for call, generation in zip(calls[:4], done[:4], strict=True):
        before, after = generation.spans
        assert (before.start, before.weight_version, before.kv_version_min) == (0, 4, 4)
        assert after == VersionSpan(before.end, 20, 5, 4)
        assert 1 < before.end < 20
        models = [old.model] * before.end + [new.model] * (20 - before.end)
        tokens, logprobs = replay(models, call)
        assert generation.token_ids == tokens
        assert np.abs(np.array(generation.logprobs) - logprobs).max() <= 1e-4
        recomputed = recomputed_logprobs(new.model, call, tokens)[before.end :]
        assert np.abs(logprobs[before.end :] - recomputed).max() > 1e-2
    for call, generation in zip(calls[4:], done[4:], strict=True):
        assert generation.spans == (VersionSpan(0, 20, 5, 5),)
        assert_exact(new, call, generation)


def test_kv_version_min_stays_the_oldest_over_two_swaps(old, new):
    async def main():
        engine = await attached(old, version=4)
        task = asyncio.create_task(engine.generate(requests(1, max_tokens=30)[0]))
        for version, published in ((5, new), (6, old)):
            await turn_loop(60)
            await engine.update(version, published.path, published.root_hash, "keep")
        return await task

    spans = asyncio.run(main()).spans
    assert [(s.weight_version, s.kv_version_min) for s in spans] == [(4, 4), (5, 4), (6, 4)]
    assert [s.start for s in spans[1:]] == [s.end for s in spans[:-1]]
    assert (spans[0].start, spans[-1].end) == (0, 30)


def test_abort_returns_at_once_and_resubmission_is_exact(old, new):
    calls = requests(5)

    async def main():
        engine = await attached(old, version=0, num_slots=3)
        tasks = [asyncio.create_task(engine.generate(call)) for call in calls]
        await turn_loop(70)
        assert (await engine.update(1, new.path, new.root_hash, "abort")).ok
        partial = await asyncio.gather(*tasks[:3])
        resubmitted = [
            replace(
                call,
                token_ids=(*call.token_ids, *generation.token_ids),
                sampling=replace(call.sampling, max_tokens=20 - len(generation.token_ids)),
            )
            for call, generation in zip(calls, partial, strict=False)
        ]
        finished = await generate_all(engine, resubmitted)
        return partial, resubmitted, finished, await asyncio.gather(*tasks[3:])

    partial, resubmitted, finished, queued = asyncio.run(main())
    for call, generation in zip(calls, partial, strict=False):
        assert generation.finish_reason == "abort"
        assert 1 < len(generation.token_ids) < 20
        assert generation.spans == (VersionSpan(0, len(generation.token_ids), 0, 0),)
        assert_exact(old, call, generation)
    for call, generation in zip([*resubmitted, *calls[3:]], [*finished, *queued], strict=True):
        assert {(s.weight_version, s.kv_version_min) for s in generation.spans} == {(1, 1)}
        assert_exact(new, call, generation)


def test_resubmission_under_the_same_weights_goes_on_as_if_never_aborted(old):
    call = requests(1)[0]

    async def main():
        engine = await attached(old)
        whole = await engine.generate(call)
        task = asyncio.create_task(engine.generate(call))
        await turn_loop(70)
        await engine.update(1, old.path, old.root_hash, "abort")
        head = await task
        rest = replace(call, token_ids=(*call.token_ids, *head.token_ids))
        sampling = replace(call.sampling, max_tokens=20 - len(head.token_ids))
        tail = await engine.generate(replace(rest, sampling=sampling))
        return whole, head, tail

    whole, head, tail = asyncio.run(main())
    assert (*head.token_ids, *tail.token_ids) == whole.token_ids


def test_wait_finishes_running_requests_first(old, new):
    calls = requests(5)

    async def main():
        engine = await attached(old, version=0, num_slots=3)
        tasks = [asyncio.create_task(engine.generate(call)) for call in calls]
        await turn_loop(40)
        update = asyncio.create_task(engine.update(1, new.path, new.root_hash, "wait"))
        await turn_loop(20)
        with pytest.raises(RuntimeError, match="in the middle of another update"):
            await engine.update(2, new.path, new.root_hash, "keep")
        assert (await update).ok
        return await asyncio.gather(*tasks)

    done = asyncio.run(main())
    for index, (call, generation) in enumerate(zip(calls, done, strict=True)):
        published, version = (old, 0) if index < 3 else (new, 1)
        assert generation.spans == (VersionSpan(0, 20, version, version),)
        assert_exact(published, call, generation)


def test_wait_refuses_a_paused_engine_and_ends_with_a_closed_one(old, new):
    async def main():
        engine = await attached(old, version=0)
        task = asyncio.create_task(engine.generate(requests(1)[0]))
        await turn_loop(40)
        await engine.pause()
        with pytest.raises(RuntimeError, match="is paused with requests in flight"):
            await engine.update(1, new.path, new.root_hash, "wait")
        await engine.resume()
        update = asyncio.create_task(engine.update(1, new.path, new.root_hash, "wait"))
        await turn_loop(5)
        await engine.close()
        outcomes = await asyncio.gather(task, update, return_exceptions=True)
        return [str(outcome) for outcome in outcomes], engine.describe().weight_version

    messages = ["engine torch-0 was closed.", "engine torch-0 is closed."]
    assert asyncio.run(main()) == (messages, 0)


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_a_hash_mismatch_keeps_the_old_weights(old, new, mode):
    call = requests(1)[0]

    async def main():
        engine = await attached(old, version=7)
        task = asyncio.create_task(engine.generate(call))
        await turn_loop(40)
        attestation = await engine.update(8, new.path, old.root_hash, mode)
        return attestation, engine.describe().weight_version, await task

    attestation, served, generation = asyncio.run(main())
    assert not attestation.ok
    assert attestation.root_hash == new.root_hash
    assert attestation.reason is not None
    assert new.root_hash in attestation.reason and old.root_hash in attestation.reason
    assert served == 7
    assert generation.finish_reason == "length"
    assert_exact(old, call, generation)


def test_a_mismatch_on_the_first_version_leaves_the_engine_without_one(old):
    async def main():
        engine = make_engine(old)
        assert not (await engine.update(0, old.path, "0" * 64, "wait")).ok
        await engine.generate(requests(1)[0])

    with pytest.raises(RuntimeError, match="has not attested any version"):
        asyncio.run(main())


def test_a_mixture_attests_its_published_layout(tmp_path):
    published = publish(tmp_path, "qwen3_moe")
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in load_file(
        published.path / "model.safetensors"
    )
    engine = asyncio.run(attached(published, version=2))
    assert engine.describe().weight_version == 2


def rewritten(published, path, change):
    """A copy of a published folder with `change` applied to its tensors."""
    shutil.copytree(published.path, path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def drop(tensors):
    del tensors["model.norm.weight"]


def add(tensors):
    tensors["model.extra.weight"] = torch.zeros(2, dtype=torch.bfloat16)


def reshape(tensors):
    tensors["model.norm.weight"] = torch.zeros(3, dtype=torch.bfloat16)


def sharpen(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 1e-5


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (drop, "lacks 1 of the model's tensors, model.norm.weight first"),
        (add, "holds 1 tensors the model does not have, model.extra.weight first"),
        (reshape, r"model.norm.weight in .* has shape \(3,\), the model needs \(32,\)"),
        (sharpen, "model.norm.weight holds values that bf16 cannot represent"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(old, tmp_path, change, sentence):
    folder = rewritten(old, tmp_path / "changed", change)
    with pytest.raises(ValueError, match=sentence):
        asyncio.run(make_engine(old).update(0, folder, old.root_hash, "wait"))


def test_a_folder_without_weights_or_configuration_is_refused(old, tmp_path):
    with pytest.raises(ValueError, match=r"holds no \.safetensors file"):
        asyncio.run(make_engine(old).update(0, tmp_path, old.root_hash, "wait"))
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        make_engine(replace(old, path=tmp_path))


def test_bad_update_arguments_are_refused(old):
    engine = make_engine(old)
    with pytest.raises(ValueError, match="update mode must be one of"):
        asyncio.run(engine.update(0, old.path, old.root_hash, "now"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight version must be 0 or more"):
        asyncio.run(engine.update(-1, old.path, old.root_hash, "wait"))
