"""The experts that the torch engine reports, against plain transformers forward passes.

The reference takes the router's logits from `output_router_logits` and picks the largest itself; it
shares no hook and no cache layout with the engine.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from tasks.engines.protocol import Generation, Request, VersionSpan
from tests.engine_models import (
    PLAIN,
    VOCAB,
    attached,
    chosen_experts,
    generate_all,
    prompts,
    publish,
    recomputed_experts,
    turn_loop,
)

TOP_K = 2


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("old"), "qwen3_moe", seed=1)


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("new"), "qwen3_moe", seed=2)


def requests(count: int, max_tokens: int = 20) -> list[Request]:
    return [
        Request(f"r{i}", prompt, replace(PLAIN, max_tokens=max_tokens, seed=i), ())
        for i, prompt in enumerate(prompts(count, seed=3))
    ]


@torch.inference_mode()
def recomputed_over_versions(
    models: Sequence[PreTrainedModel], prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """The same over one cache, `models[i]` forwarding what precedes output token i."""
    cache = DynamicCache(config=models[0].config)
    rows, pending = [], list(prompt)
    for model, token in zip(models, output, strict=True):
        result = model(
            input_ids=torch.tensor([pending]),
            cache=cache,
            use_cache=True,
            output_router_logits=True,
        )
        rows.append(chosen_experts(result.router_logits, TOP_K))
        pending = [token]
    return np.concatenate(rows)


def reported(generation: Generation) -> np.ndarray:
    assert generation.routing is not None
    return generation.routing.experts


def assert_plain(published, request: Request, generation: Generation) -> None:
    forwarded = (*request.token_ids, *generation.token_ids)[:-1]
    assert len(reported(generation)) == len(request.token_ids) + len(generation.token_ids) - 1
    assert np.array_equal(reported(generation), recomputed_experts(published.model, forwarded))


def test_experts_equal_a_plain_forward_pass_while_slots_refill(old):
    calls = [
        replace(call, sampling=replace(call.sampling, max_tokens=1 + 5 * i % 12))
        for i, call in enumerate(requests(30))
    ]

    async def main():
        engine = await attached(old, num_slots=4)
        return engine.describe(), await generate_all(engine, calls)

    description, done = asyncio.run(main())
    assert description.num_experts == 4
    assert (description.num_routed_layers, description.num_experts_per_token) == (2, TOP_K)
    assert {len(generation.token_ids) for generation in done} >= {1, 2, 12}
    for call, generation in zip(calls, done, strict=True):
        assert_plain(old, call, generation)
        assert reported(generation).dtype == np.uint8


def test_rows_of_a_prompt_computed_once_reach_every_request_that_shares_it(old, monkeypatch):
    monkeypatch.setattr("tasks.engines.model_runner._MAX_PREFILL_TOKENS", 8)
    shared, other, third = (1, 2, 3, 4, 5), (6, 7, 8), (9, 10, 11, 12, 13, 14)
    order = [shared, other, shared, third, shared, other]
    calls = [Request(f"r{i}", p, replace(PLAIN, seed=i), ()) for i, p in enumerate(order)]

    async def main():
        return await generate_all(await attached(old, num_slots=6), calls)

    done = asyncio.run(main())
    assert [generation.num_cached_tokens for generation in done] == [0, 0, 5, 0, 5, 3]
    for call, generation in zip(calls, done, strict=True):
        assert_plain(old, call, generation)


def test_keep_takes_rows_from_the_weights_that_forwarded_each_token(old, new):
    calls = requests(4)

    async def main():
        engine = await attached(old, version=4)
        tasks = [asyncio.create_task(engine.generate(call)) for call in calls]
        await turn_loop(70)
        assert (await engine.update(5, new.path, new.root_hash, "keep")).ok
        return await asyncio.gather(*tasks)

    for call, generation in zip(calls, asyncio.run(main()), strict=True):
        before, after = generation.spans
        assert after == VersionSpan(before.end, 20, 5, 4) and before.end > 1
        models = [old.model] * before.end + [new.model] * (20 - before.end)
        expected = recomputed_over_versions(models, call.token_ids, generation.token_ids)
        assert np.array_equal(reported(generation), expected)
        # The row behind the first new token is already the new weights', and it matters.
        split = len(call.token_ids) + before.end - 1
        stale = recomputed_experts(old.model, (*call.token_ids, *generation.token_ids)[:-1])
        assert np.array_equal(reported(generation)[:split], stale[:split])
        assert not np.array_equal(reported(generation)[split:], stale[split:])


def test_abort_returns_the_rows_so_far_and_the_resubmission_reports_all_again(old, new):
    calls = requests(3)

    async def main():
        engine = await attached(old, version=0)
        tasks = [asyncio.create_task(engine.generate(call)) for call in calls]
        await turn_loop(70)
        assert (await engine.update(1, new.path, new.root_hash, "abort")).ok
        partial = await asyncio.gather(*tasks)
        again = [
            replace(call, token_ids=(*call.token_ids, *generation.token_ids))
            for call, generation in zip(calls, partial, strict=True)
        ]
        return partial, again, await generate_all(engine, again)

    partial, again, finished = asyncio.run(main())
    for call, generation in zip(calls, partial, strict=True):
        assert generation.finish_reason == "abort" and 1 < len(generation.token_ids) < 20
        assert_plain(old, call, generation)
    for call, generation in zip(again, finished, strict=True):
        assert_plain(new, call, generation)


def test_only_routed_layers_have_rows_and_above_256_experts_they_are_wide(tmp_path):
    mixed = publish(
        tmp_path, "qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1], num_experts=300,
        num_experts_per_tok=5, moe_intermediate_size=4,
    )  # fmt: skip
    call = Request("r", tuple(range(40)), replace(PLAIN, max_tokens=20), ())

    async def main():
        engine = await attached(mixed)
        return engine.describe(), await engine.generate(call)

    description, generation = asyncio.run(main())
    assert (description.num_experts, description.num_routed_layers) == (300, 2)
    assert reported(generation).dtype == np.uint16
    assert reported(generation).max() > 255
    forwarded = (*call.token_ids, *generation.token_ids)[:-1]
    assert max(forwarded) < VOCAB
    assert np.array_equal(reported(generation), recomputed_experts(mixed.model, forwarded))


def test_a_dense_model_reports_none_and_gets_no_hook(tmp_path):
    dense = publish(tmp_path)

    async def main():
        engine = await attached(dense)
        hooks = sum(len(module._forward_pre_hooks) for module in engine._model.modules())
        return engine.describe(), hooks, await engine.generate(requests(1)[0])

    description, hooks, generation = asyncio.run(main())
    assert (description.num_experts, description.num_routed_layers) == (None, None)
    assert description.num_experts_per_token is None
    assert hooks == 0 and generation.routing is None
