"""The torch engine against a plain forward pass, and its scheduling."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

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

SAMPLINGS = [
    PLAIN,
    replace(PLAIN, temperature=0.7),
    replace(PLAIN, top_k=5),
    replace(PLAIN, top_p=0.8),
    replace(PLAIN, min_p=0.1),
    replace(PLAIN, temperature=0.7, top_k=20, top_p=0.9, min_p=0.02),
]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("qwen3"))


def mixed_requests(count: int, stop: tuple[int, ...] = ()) -> list[Request]:
    """Every sampling, output limits 1 to 12, prompts of 1 to 12 tokens."""
    return [
        Request(
            f"r{i}",
            prompt,
            replace(SAMPLINGS[i % len(SAMPLINGS)], max_tokens=1 + i * 5 % 12, seed=1000 + i),
            stop,
        )
        for i, prompt in enumerate(prompts(count))
    ]


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
def test_logprobs_equal_a_plain_forward_pass_while_slots_refill(kind, tmp_path):
    published = publish(tmp_path, kind)
    requests = mixed_requests(30)

    async def main():
        engine = await attached(published, version=3, num_slots=4)
        return await generate_all(engine, requests)

    for request, generation in zip(requests, asyncio.run(main()), strict=True):
        expected = recomputed_logprobs(published.model, request, generation.token_ids)
        assert np.abs(np.array(generation.logprobs) - expected).max() <= 1e-4
        assert len(generation.token_ids) == request.sampling.max_tokens
        assert generation.finish_reason == "length"
        assert generation.spans == (VersionSpan(0, len(generation.token_ids), 3, 3),)
        assert all(np.float32(x) == x and x <= 0 for x in generation.logprobs)
        assert min(generation.queued_s, generation.prefill_s, generation.decode_s) >= 0


def test_tokens_equal_a_replay_with_the_same_uniform_numbers(qwen3):
    requests = mixed_requests(12)

    async def main():
        return await generate_all(await attached(qwen3, num_slots=5), requests)

    for request, generation in zip(requests, asyncio.run(main()), strict=True):
        tokens, logprobs = replay([qwen3.model] * request.sampling.max_tokens, request)
        assert generation.token_ids == tokens
        assert np.abs(np.array(generation.logprobs) - logprobs).max() <= 1e-4


def test_same_request_gives_same_tokens_in_any_batch(qwen3):
    requests = mixed_requests(40)

    async def main(num_slots, order):
        engine = await attached(qwen3, num_slots=num_slots)
        done = await generate_all(engine, [requests[i] for i in order])
        return {i: g.token_ids for i, g in zip(order, done, strict=True)}

    forward = asyncio.run(main(1, range(40)))
    assert asyncio.run(main(16, range(39, -1, -1))) == forward
    assert asyncio.run(main(40, range(40))) == forward


def test_stop_token_ends_the_output_and_belongs_to_it(qwen3):
    request = Request("r", (1, 2, 3), replace(PLAIN, max_tokens=20, seed=5), ())

    async def main(stop):
        engine = await attached(qwen3)
        return await engine.generate(replace(request, stop_token_ids=stop))

    whole = asyncio.run(main(()))
    stop = whole.token_ids[4]
    cut = whole.token_ids.index(stop) + 1
    stopped = asyncio.run(main((stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == whole.token_ids[:cut]
    assert len(stopped.logprobs) == cut


def test_max_model_tokens_caps_the_output(qwen3):
    async def main():
        engine = await attached(qwen3, max_model_tokens=10)
        return await engine.generate(Request("r", (1,) * 7, replace(PLAIN, max_tokens=50), ()))

    generation = asyncio.run(main())
    assert (len(generation.token_ids), generation.finish_reason) == (3, "length")


def test_long_prompts_are_prefilled_in_bounded_passes(qwen3, monkeypatch):
    monkeypatch.setattr("tasks.engines.model_runner._MAX_PREFILL_TOKENS", 16)
    requests = mixed_requests(12)

    async def main():
        return await generate_all(await attached(qwen3, num_slots=12), requests)

    for request, generation in zip(requests, asyncio.run(main()), strict=True):
        expected = recomputed_logprobs(qwen3.model, request, generation.token_ids)
        assert np.abs(np.array(generation.logprobs) - expected).max() <= 1e-4


def test_a_group_computes_its_prompt_once(qwen3):
    shared, other = (1, 2, 3, 4, 5), (6, 7, 8)
    requests = [
        Request(f"r{i}", prompt, replace(PLAIN, seed=i), ())
        for i, prompt in enumerate([shared, other, shared, shared, other])
    ]

    async def main():
        return await generate_all(await attached(qwen3, num_slots=5), requests)

    done = asyncio.run(main())
    assert [generation.num_cached_tokens for generation in done] == [0, 0, 5, 5, 3]
    for request, generation in zip(requests, done, strict=True):
        expected = recomputed_logprobs(qwen3.model, request, generation.token_ids)
        assert np.abs(np.array(generation.logprobs) - expected).max() <= 1e-4


def test_follow_up_turns_give_the_same_result_every_time(qwen3):
    async def trajectory(engine, index):
        tokens = prompts(8)[index]
        for turn in range(3):
            sampling = replace(PLAIN, max_tokens=1 + (index + turn) % 4, seed=index * 10 + turn)
            generation = await engine.generate(Request(f"{index}-{turn}", tokens, sampling, ()))
            tokens = (*tokens, *generation.token_ids, 7)
        return tokens, generation.logprobs

    async def main():
        engine = await attached(qwen3, num_slots=3)
        return await asyncio.gather(*(trajectory(engine, i) for i in range(8)))

    assert asyncio.run(main()) == asyncio.run(main())


def test_one_engine_serves_several_event_loops(qwen3):
    engine = make_engine(qwen3)
    asyncio.run(engine.update(0, qwen3.path, qwen3.root_hash, "wait"))
    request = Request("r", (1, 2), PLAIN, ())
    first = asyncio.run(engine.generate(request))
    assert asyncio.run(engine.generate(request)).token_ids == first.token_ids
    asyncio.run(engine.close())
    with pytest.raises(RuntimeError, match="engine torch-0 is closed"):
        asyncio.run(engine.update(1, qwen3.path, qwen3.root_hash, "keep"))


def test_a_failed_step_reaches_its_callers_and_leaves_the_engine_usable(qwen3, monkeypatch):
    async def main():
        engine = await attached(qwen3)
        with monkeypatch.context() as patched:
            patched.setattr("tasks.engines.batch.draw", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await engine.generate(Request("r", (1, 2), PLAIN, ()))
        return await engine.generate(Request("r", (1, 2), PLAIN, ()))

    assert len(asyncio.run(main()).token_ids) == PLAIN.max_tokens


def test_pause_holds_and_resume_continues(qwen3):
    async def main():
        engine = await attached(qwen3)
        await engine.pause()
        task = asyncio.create_task(engine.generate(Request("r", (1, 2), PLAIN, ())))
        await turn_loop(100)
        held = not task.done()
        await engine.resume()
        return held, await task

    held, generation = asyncio.run(main())
    assert held
    assert len(generation.token_ids) == PLAIN.max_tokens


def test_a_cancelled_request_frees_its_slot(qwen3):
    requests = mixed_requests(6)

    async def main():
        engine = await attached(qwen3, num_slots=2)
        endless = replace(PLAIN, max_tokens=60)
        tasks = [
            asyncio.create_task(engine.generate(Request(f"e{i}", (1, i), endless, ())))
            for i in range(3)
        ]
        await turn_loop(30)
        for task in tasks:
            task.cancel()
        return await generate_all(engine, requests)

    for request, generation in zip(requests, asyncio.run(main()), strict=True):
        expected = recomputed_logprobs(qwen3.model, request, generation.token_ids)
        assert np.abs(np.array(generation.logprobs) - expected).max() <= 1e-4


def test_close_ends_waiting_requests_with_an_error(qwen3):
    async def main():
        engine = await attached(qwen3, num_slots=1)
        tasks = [
            asyncio.create_task(
                engine.generate(Request(f"r{i}", (1,), replace(PLAIN, max_tokens=60), ()))
            )
            for i in range(2)
        ]
        await turn_loop(30)
        await engine.close()
        with pytest.raises(RuntimeError, match="engine torch-0 is closed"):
            await engine.generate(Request("late", (1,), PLAIN, ()))
        return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = asyncio.run(main())
    assert [str(outcome) for outcome in outcomes] == ["engine torch-0 was closed."] * 2


def test_bfloat16_compute_stays_near_float32(qwen3):
    requests = mixed_requests(12)

    async def main():
        engine = await attached(qwen3, compute_dtype="bfloat16")
        return await generate_all(engine, [replace(r, sampling=PLAIN) for r in requests])

    differences = np.concatenate(
        [
            np.array(g.logprobs)
            - recomputed_logprobs(qwen3.model, replace(r, sampling=PLAIN), g.token_ids)
            for r, g in zip(requests, asyncio.run(main()), strict=True)
        ]
    )
    assert 1e-4 < np.abs(differences).mean() < 0.1
