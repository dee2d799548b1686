"""What recording costs: rollouts into the lake, against the same requests over bare HTTP.

    make bench-rollout

One vLLM server on this machine's CPU samples the same 64 rollouts twice in each pair: once through
the engine client, scored, put through gate 1 and committed to a lake on disk; once by posting the
same bodies with httpx and counting the tokens of the JSON that returns. The policy has the demo's
size and random weights, so that answers are long: an untrained policy stops at the first stop token
that it happens to draw. Prints tokens/s of both and one line: the median over the pairs of the
ratio recorded / bare, with all ratios' range, which is the median's 98 % interval for 7 pairs.
"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import httpx
from rich.console import Console

from flows.attachment import attach
from flows.engines import build_engines
from flows.opening import OpenRun, find_run, holding_lease, take_run
from flows.run_file import load_run_file
from flows.windows import commit_window, gate1_limits
from schemas.config import RunConfig
from tasks.engines.fleet import Fleet
from tasks.engines.protocol import Request, RolloutEngine
from tasks.engines.vllm import VllmEngine
from tasks.engines.vllm_wire import payload
from tasks.environments import make_environment
from tasks.policy import training_problems, write_initial_policy
from tasks.record import Window, record_rollouts
from tasks.rollout import RolloutContext, engine_sampling, sample_group
from tasks.seeds import derive_seed

RUN_FILE = Path("infra/runs/vllm-demo.toml")
NUM_PAIRS = 7
NUM_GROUPS, GROUP_SIZE = 8, 8
MAX_TOKENS = 1024
TARGET = 0.95


def configuration(folder: Path) -> RunConfig:
    """The demo's run file with a random policy, long answers and a lake under `folder`."""
    demo = load_run_file(RUN_FILE)
    settings = demo.policy.warm_start
    assert settings is not None
    environment = make_environment(demo.environment.name, demo.environment.options)
    texts = [
        text
        for messages, answer in training_problems(environment, 2000, settings.seed)
        for text in (*(message["content"] for message in messages), answer)
    ]
    (folder / "policy").mkdir()
    write_initial_policy(folder / "policy", settings, texts)
    changes = {
        "run": {"lake": str(folder / "lake"), "store": str(folder / "store")},
        "engine": {"max_model_tokens": MAX_TOKENS + 64},
        "sampling": {"max_tokens": MAX_TOKENS},
        "policy": {"path": str(folder / "policy"), "warm_start": None},
    }
    data = demo.model_dump(mode="json")
    for section, values in changes.items():
        data[section] |= values
    return RunConfig.model_validate(data)


async def recorded(run: OpenRun, context: RolloutContext, first_group: int) -> tuple[int, float]:
    """Tokens and seconds of 64 rollouts from the first request to the ledger row."""
    started = time.perf_counter()
    groups = await asyncio.gather(
        *(
            sample_group(
                context,
                context.environment.sample(group),
                run.config.sampling,
                group,
                GROUP_SIZE,
            )
            for group in range(first_group, first_group + NUM_GROUPS)
        )
    )
    rollouts = [rollout for group in groups for rollout in group]
    result = record_rollouts(
        run.lake,
        Window.of(rollouts),
        gate1_limits(run, context),
        run_id=run.run_id,
        cycle=0,
        lease=run.lease,
        scope="benchmark",
    )
    assert result.judgement.ok, result.judgement.reason
    commit_window(run, result)
    return sum(r.trajectory["num_action_tokens"] for r in rollouts), time.perf_counter() - started


async def bare(
    run: OpenRun, context: RolloutContext, client: httpx.AsyncClient, first_group: int
) -> tuple[int, float]:
    """Tokens and seconds of the same 64 requests, posted and counted."""
    started = time.perf_counter()

    async def ask(group: int, sample: int) -> int:
        prompt = context.renderer.prompt(context.environment.sample(group).messages)
        sampling = engine_sampling(
            run.config.sampling,
            max_tokens=MAX_TOKENS,
            seed=derive_seed(context.run_seed, group, sample, 0, 0),
        )
        request = Request("bare", tuple(prompt), sampling, context.renderer.stop_token_ids)
        body = payload(request, "bare", MAX_TOKENS + 64) | {"request_id": f"bare-{group}-{sample}"}
        response = await client.post("/inference/v1/generate", json=body)
        return len(response.raise_for_status().json()["choices"][0]["token_ids"])

    tokens = await asyncio.gather(
        *(
            ask(group, sample)
            for group in range(first_group, first_group + NUM_GROUPS)
            for sample in range(GROUP_SIZE)
        )
    )
    return sum(tokens), time.perf_counter() - started


async def measure(run: OpenRun, context: RolloutContext, url: str, console: Console) -> list[float]:
    """The ratio of each pair; the first side alternates, and one unmeasured pair warms up."""
    ratios = []
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(
        base_url=url, timeout=600.0, limits=limits, trust_env=False
    ) as client:
        for pair in range(NUM_PAIRS + 1):
            first_group = pair * NUM_GROUPS
            if pair % 2:
                plain = await bare(run, context, client, first_group)
                ours = await recorded(run, context, first_group)
            else:
                ours = await recorded(run, context, first_group)
                plain = await bare(run, context, client, first_group)
            speeds = [tokens / seconds for tokens, seconds in (ours, plain)]
            console.print(
                f"pair {pair}: {ours[0]} tokens, recorded {speeds[0]:,.0f} tok/s, "
                f"bare {plain[0]} tokens, {speeds[1]:,.0f} tok/s, ratio {speeds[0] / speeds[1]:.3f}"
                + (" (warm-up)" if pair == 0 else "")
            )
            if pair:
                ratios.append(speeds[0] / speeds[1])
    return ratios


def _url(engines: list[RolloutEngine]) -> str:
    (engine,) = engines
    assert isinstance(engine, VllmEngine)
    return engine.url


async def main() -> None:
    console = Console(stderr=True, soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(Path(folder))
        run = find_run(config, str(RUN_FILE), lambda event: None)
        take_run(run)
        engines = build_engines(run)
        fleet = Fleet(engines, patience_s=60.0)
        try:
            context = await holding_lease(run, attach(run, fleet))
            ratios = await holding_lease(run, measure(run, context, _url(engines), console))
        finally:
            await fleet.close()
    median = statistics.median(ratios)
    verdict = "OK" if median >= TARGET else "MISS"
    print(
        f"recording overhead: tokens/s into the lake / bare HTTP {median:.3f} "
        f"[{min(ratios):.3f}, {max(ratios):.3f}], target >= {TARGET} {verdict}"
    )


if __name__ == "__main__":
    asyncio.run(main())
