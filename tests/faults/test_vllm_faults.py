"""Servers that die, return, or lie: the batch completes, and nothing is sampled twice into the
lake."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.attachment import attach, keep_attached
from flows.engines import build_engines
from flows.opening import find_run, holding_lease, take_run
from flows.run import execute_run_sync
from flows.windows import commit_window, gate1_limits
from tasks.engines.fleet import Fleet
from tasks.engines.protocol import EngineLost
from tasks.record import Window, record_rollouts
from tasks.rollout import sample_group
from tests.tiny_run import RUN_ID, TinyRun
from tests.vllm_world import RUN_ON_VLLM, SCRIPT

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def signal_server(fleet: Fleet, index: int, number: signal.Signals) -> None:
    """To the whole process group of a server; SIGKILL is as if its machine had lost power."""
    os.killpg(fleet.members[index]._server.pid, number)


def script_with(folder: Path, flags: str) -> Path:
    script = folder / "serve.sh"
    script.write_text(f'#!/bin/bash\nexec {SCRIPT} "$@" {flags}\n')
    script.chmod(0o755)
    return script


def test_a_server_killed_in_the_middle_of_a_batch(tiny_run: Callable[..., TinyRun], tmp_path: Path):
    # Compiling takes a third of a start, and three servers start here.
    script = script_with(tmp_path, "--enforce-eager")
    tiny = tiny_run(
        *RUN_ON_VLLM,
        f"engine.vllm.launch={script}",
        "engine.vllm.num_servers=2",
        "batch.trajectories=64",
    )
    events: list[dict[str, str]] = []

    async def main():
        run = find_run(tiny.config, "tiny.toml", lambda event: None)
        take_run(run)
        fleet = Fleet(build_engines(run), patience_s=300.0)
        try:
            context = await holding_lease(run, attach(run, fleet))
            watcher = asyncio.create_task(keep_attached(run, context, events.append))
            await killed_batch(run, context, fleet)
            while fleet.out_of_traffic:
                assert not watcher.done(), watcher.result()
                await asyncio.sleep(0.2)
            # The returned server gets traffic again: it has the fewest requests.
            await killed_batch(run, context, fleet, first_group=16, kills=False)
            watcher.cancel()
        finally:
            await fleet.close()

    asyncio.run(main())
    assert [event["event"] for event in events] == ["engine_lost", "engine_returned"], events
    lake = tiny.lake
    named = lake.read("trajectories", run_id=RUN_ID).to_pylist()
    assert len(named) == len({row["trajectory_id"] for row in named}) == 128
    assert {row["status"] for row in named} <= {"completed", "truncated"}
    requests = lake.read("requests", run_id=RUN_ID).to_pylist()
    assert len(requests) == len({(r["trajectory_id"], r["part_index"]) for r in requests}) == 128
    assert {row["engine_id"] for row in requests[:64]} == {"vllm-0", "vllm-1"}
    attested = lake.read(
        "attestations", run_id=RUN_ID, order_by="attested_at", columns=["engine_id", "ok"]
    ).to_pylist()
    assert [(row["engine_id"], row["ok"]) for row in attested] == [
        ("vllm-0", True),
        ("vllm-1", True),
        ("vllm-1", True),
    ]


async def killed_batch(run, context, fleet, *, first_group=0, kills=True):
    """Samples and records 64 rollouts; kills server 1 once it has answered eight requests, with
    its others under way: it stops before they are sent, and dies after."""
    victim, num_sent, num_answered = fleet.members[1], 0, 0
    generate, stopped = victim.generate, asyncio.Event()

    async def counting(request):
        nonlocal num_sent, num_answered
        num_sent += 1
        if kills and num_sent > 8:
            await stopped.wait()
        generation = await generate(request)
        num_answered += 1
        if num_answered == 8 and kills:
            signal_server(fleet, 1, signal.SIGSTOP)
            stopped.set()
            loop = asyncio.get_running_loop()
            loop.call_later(0.5, signal_server, fleet, 1, signal.SIGKILL)
        return generation

    victim.generate = counting
    environment = context.environment
    groups = await asyncio.gather(
        *(
            sample_group(context, environment.sample(group), run.config.sampling, group, 4)
            for group in range(first_group, first_group + 16)
        )
    )
    victim.generate = generate
    assert num_answered >= 8 and (victim in fleet.out_of_traffic) == kills
    recorded = record_rollouts(
        run.lake,
        Window.of([rollout for group in groups for rollout in group]),
        gate1_limits(run, context),
        run_id=run.run_id,
        cycle=run.cycle,
        lease=run.lease,
        scope="test",
    )
    assert recorded.judgement.ok and not recorded.quarantined
    commit_window(run, recorded)


def test_raw_logprobs_are_refused_with_the_flag_to_set(
    tiny_run: Callable[..., TinyRun], tmp_path: Path
):
    script = script_with(tmp_path, "--logprobs-mode raw_logprobs --enforce-eager")
    finished = tiny_run(*RUN_ON_VLLM, f"engine.vllm.launch={script}").run("--no-prefect")
    assert finished.returncode == 2
    assert "set --logprobs-mode processed_logprobs" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_server_that_cannot_start_shows_the_end_of_its_log(
    tiny_run: Callable[..., TinyRun], tmp_path: Path
):
    script = script_with(tmp_path, "--no-such-flag")
    finished = tiny_run(*RUN_ON_VLLM, f"engine.vllm.launch={script}").run("--no-prefect")
    assert finished.returncode == 1
    assert "unrecognized arguments: --no-such-flag" in finished.stderr


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("engine.vllm.launch=nowhere.sh",), "nowhere.sh is not an executable file"),
        (("sampling.top_p=0.9",), "set sampling.allow_truncation = true"),
        (("sampling.temperature=3.0",), "vLLM takes temperatures from 0.01 to 2"),
        (("engine.vllm.canary_tokens=1",), "canary_tokens = 1 compares nothing"),
        (("engine.vllm.urls=['http://127.0.0.1:9']",), "give either urls"),
        (("engine.vllm.colocated=true", "asynchrony.k=1"), "set asynchrony.k = 0"),
        (("engine.backend=torch",), "belong together"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_one_sentence(tiny_run: Callable[..., TinyRun], settings, sentence):
    finished = tiny_run(*RUN_ON_VLLM, *settings).run("--no-prefect")
    assert finished.returncode == 2 and sentence in finished.stderr
    assert "Traceback" not in finished.stderr


def test_nobody_at_the_url_fails_the_run(tiny_run: Callable[..., TinyRun]):
    tiny = tiny_run(
        "policy.warm_start.head_dim=32",
        "engine.backend=vllm",
        "engine.vllm.urls=['http://127.0.0.1:9']",
    )
    with pytest.raises(EngineLost, match="cannot be reached"):
        execute_run_sync(tiny.config, "tiny.toml")
