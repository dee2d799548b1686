"""Sample the rollouts of one group and write down every token as it was sampled.

Token ids go in and come out; text is decoded only for the scorer and for people. A turn whose
request an update aborts is sent again with its own tokens until it ends, and each part keeps the
version and log-probability it was sampled with.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from schemas.config import SamplingSection
from tasks.engines.fleet import Fleet
from tasks.engines.protocol import EngineDescription, EngineTimeout, Request, Sampling
from tasks.environments.protocol import Environment, ScorerError, Task
from tasks.recorder import Recorder, Row
from tasks.renderers import Renderer
from tasks.seeds import derive_seed


@dataclass(frozen=True)
class RolloutContext:
    """What all rollouts of a run share."""

    engine: Fleet
    environment: Environment
    renderer: Renderer
    run_seed: int


@dataclass
class Rollout:
    """One finished rollout as lake rows: its trajectory, its segments, its requests, and the
    routing of its segments, which a dense model does not have."""

    trajectory: Row
    segments: list[Row]
    requests: list[Row]
    routing: list[Row]


async def _sample_turn(
    context: RolloutContext,
    recorder: Recorder,
    sampling: SamplingSection,
    place: tuple[int, int, int],
) -> tuple[list[int], str]:
    """The action tokens of one turn and why they ended; `place` is (group, sample, turn)."""
    turn = place[2]
    action: list[int] = []
    for part in range(sampling.max_tokens + 1):
        prompt = tuple(recorder.token_ids)
        generation = await context.engine.generate(
            Request(
                request_id=f"{recorder.trajectory_id}/{turn}/{part}",
                token_ids=prompt,
                # A part has its own seed: the same numbers at new positions would correlate them.
                sampling=engine_sampling(
                    sampling,
                    max_tokens=sampling.max_tokens - len(action),
                    seed=derive_seed(context.run_seed, *place, part),
                ),
                stop_token_ids=context.renderer.stop_token_ids,
                affinity=f"group-{place[0]}",
            )
        )
        recorder.action(turn, generation)
        action += generation.token_ids
        recorder.request(turn, part, len(prompt), generation)
        if generation.finish_reason != "abort":
            return action, generation.finish_reason
    raise RuntimeError(
        f"Request {recorder.trajectory_id}/{turn} was aborted {sampling.max_tokens + 1} times "
        'without ending; use update = "wait" or "keep", or update less often.'
    )


def engine_sampling(section: SamplingSection, *, max_tokens: int, seed: int) -> Sampling:
    return Sampling(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        max_tokens=max_tokens,
        seed=seed,
    )


@dataclass(frozen=True)
class _Ended:
    """How a conversation ended, and what was said; reward and components are None if it failed."""

    status: str
    finish_reason: str
    num_turns: int
    messages: list[Mapping[str, str]]
    reward: float | None = None
    components: Mapping[str, float] | None = None


async def sample_trajectory(
    context: RolloutContext, task: Task, sampling: SamplingSection, group: int, sample: int
) -> Rollout:
    """One rollout of `task`. A scorer that raises, a prompt that leaves no room for an answer or a
    request that takes too long ends it as failed: a reason and no reward."""
    engine = context.engine.describe()
    recorder = Recorder(f"{group:08d}-{sample:03d}-0")
    started_at = datetime.now(UTC)
    ended = await _converse(
        context, recorder, task, sampling, (group, sample), engine.max_model_tokens
    )
    trajectory = {
        "trajectory_id": recorder.trajectory_id,
        "group_id": group,
        "sample_index": sample,
        "attempt": 0,
        "task_id": task.task_id,
        "environment": task.environment,
        "split": task.split,
        "parent_trajectory_id": None,
        "started_at": started_at,
        "finished_at": datetime.now(UTC),
        "sampling": {
            **sampling.model_dump(include={"temperature", "top_p", "top_k", "min_p", "max_tokens"}),
            "seed": derive_seed(context.run_seed, group, sample, 0, 0),
        },
        **_described(context, engine),
        **_summed(recorder, engine),
        **_told(ended),
    }
    routing = recorder.routed.rows(recorder.segments)
    return Rollout(trajectory, recorder.segments, recorder.requests, routing)


async def _converse(
    context: RolloutContext,
    recorder: Recorder,
    task: Task,
    sampling: SamplingSection,
    place: tuple[int, int],
    max_model_tokens: int,
) -> _Ended:
    """Turns of the policy and the environment until one ends it; `place` is (group, sample)."""
    messages: list[Mapping[str, str]] = [dict(message) for message in task.messages]
    recorder.context("prompt", 0, context.renderer.prompt(task.messages))
    num_prompt = len(recorder.token_ids)
    if num_prompt >= max_model_tokens:
        reason = f"prompt: {num_prompt} tokens leave no room for an answer"
        return _Ended("failed", reason, 1, messages)
    turn = 0
    while True:
        try:
            action, finish_reason = await _sample_turn(context, recorder, sampling, (*place, turn))
        except EngineTimeout as error:
            return _Ended("failed", f"timeout: {error}", turn + 1, messages)
        answer = context.renderer.decode(action)
        messages.append({"role": "assistant", "content": answer})
        try:
            verdict = context.environment.verify(task, answer, turn)
        except ScorerError as error:
            return _Ended("failed", f"scorer: {error}", turn + 1, messages)
        scored = (turn + 1, messages, verdict.reward, verdict.components)
        if finish_reason == "length":
            return _Ended("truncated", finish_reason, *scored)
        if verdict.done:
            return _Ended("completed", finish_reason, *scored)
        assert verdict.observation is not None, "a verdict that is not done has an observation"
        observation = context.renderer.bridge(verdict.observation)
        if len(recorder.token_ids) + len(observation) >= max_model_tokens:
            return _Ended("truncated", "context", *scored)
        turn += 1
        recorder.context("observation", turn, observation)
        messages.append({"role": "user", "content": verdict.observation})


def _described(context: RolloutContext, engine: EngineDescription) -> Row:
    """What the tokens were sampled by."""
    renderer = context.renderer
    return {
        "engine": engine.engine,
        "logprobs_mode": engine.logprobs_mode,
        "renderer": renderer.name,
        "chat_template_sha256": renderer.chat_template_sha256,
        "tokenizer_sha256": renderer.tokenizer_sha256,
    }


def _summed(recorder: Recorder, engine: EngineDescription) -> Row:
    """What a trajectory says of its segments and requests as a whole."""
    actions = [segment for segment in recorder.segments if segment["kind"] == "action"]
    versions = [segment["weight_version"] for segment in actions]
    requests = recorder.requests
    return {
        "num_sequences": 1,
        "num_tokens": len(recorder.token_ids),
        "num_action_tokens": sum(len(segment["token_ids"]) for segment in actions),
        "weight_version_min": min(versions, default=None),
        "weight_version_max": max(versions, default=None),
        "engine_id": requests[-1]["engine_id"] if requests else engine.engine_id,
    }


def _told(ended: _Ended) -> Row:
    components = ended.components
    return {
        "status": ended.status,
        "finish_reason": ended.finish_reason,
        "reward": ended.reward,
        "reward_components": None if components is None else list(components.items()),
        "num_turns": ended.num_turns,
        "messages": json.dumps(ended.messages, ensure_ascii=False),
    }


async def sample_group(
    context: RolloutContext, task: Task, sampling: SamplingSection, group: int, num_samples: int
) -> list[Rollout]:
    """All rollouts of one group, sampled side by side, in sample order."""
    return await asyncio.gather(
        *(
            sample_trajectory(context, task, sampling, group, sample)
            for sample in range(num_samples)
        )
    )
