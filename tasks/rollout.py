"""Sample the rollouts of one group and write down every token as it was sampled.

Token ids go in and come out; text is decoded only for the scorer and for people. A turn whose
request an update aborts is sent again with its own tokens until it ends, and each part keeps the
version and log-probability it was sampled with.
"""

import asyncio
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from schemas.config import SamplingSection
from tasks.engines.fleet import Fleet
from tasks.engines.protocol import EngineTimeout, Generation, Request, Sampling
from tasks.environments.protocol import Environment, ScorerError, Task
from tasks.renderers import Renderer
from tasks.routed_tokens import RoutedTokens
from tasks.seeds import derive_seed

Row = dict[str, Any]


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


@dataclass
class _Recorder:
    """Grows the segments of one trajectory; positions and indices follow from the order."""

    trajectory_id: str
    token_ids: list[int] = field(default_factory=list)
    segments: list[Row] = field(default_factory=list)
    requests: list[Row] = field(default_factory=list)
    routed: RoutedTokens = field(default_factory=RoutedTokens)

    def context(self, kind: Literal["prompt", "observation"], turn: int, ids: list[int]) -> None:
        self._add(kind, turn, ids, None, None, None)

    def action(self, turn: int, generation: Generation) -> None:
        self.routed.add(generation.routing, len(self.token_ids), len(generation.token_ids))
        for span in generation.spans:
            ids = list(generation.token_ids[span.start : span.end])
            logprobs = list(generation.logprobs[span.start : span.end])
            last = self.segments[-1]
            same = (last["kind"], last["turn_index"]) == ("action", turn) and (
                last["weight_version"],
                last["kv_version_min"],
            ) == (span.weight_version, span.kv_version_min)
            if same:
                last["token_ids"] += ids
                last["rollout_logprobs"] += logprobs
                self.token_ids += ids
            elif ids:
                self._add("action", turn, ids, logprobs, span.weight_version, span.kv_version_min)

    def request(self, turn: int, part: int, num_prompt_tokens: int, call: Generation) -> None:
        load = call.load
        self.requests.append(
            {
                "trajectory_id": self.trajectory_id,
                "turn_index": turn,
                "part_index": part,
                "num_prompt_tokens": num_prompt_tokens,
                "num_cached_tokens": call.num_cached_tokens,
                "num_output_tokens": len(call.token_ids),
                "num_drafted_tokens": call.num_drafted_tokens,
                "num_accepted_tokens": call.num_accepted_tokens,
                "finish_reason": call.finish_reason,
                "drift": "clean",
                "queued_s": call.queued_s,
                "prefill_s": call.prefill_s,
                "decode_s": call.decode_s,
                "engine_id": call.engine_id,
                "cached_version_min": call.cached_version_min,
                "kv_cache_usage": None if load is None else load.kv_cache_usage,
                "num_preemptions": None if load is None else load.num_preemptions,
                "prefix_hit_rate": None if load is None else load.prefix_hit_rate,
            }
        )

    def _add(
        self,
        kind: str,
        turn: int,
        ids: list[int],
        logprobs: list[float] | None,
        version: int | None,
        kv_version: int | None,
    ) -> None:
        self.segments.append(
            {
                "trajectory_id": self.trajectory_id,
                "sequence_index": 0,
                "segment_index": len(self.segments),
                "start_position": len(self.token_ids),
                "turn_index": turn,
                "kind": kind,
                "weight_version": version,
                "kv_version_min": kv_version,
                "token_ids": list(ids),
                "rollout_logprobs": logprobs,
            }
        )
        self.token_ids += ids


async def _sample_turn(
    context: RolloutContext,
    recorder: _Recorder,
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


async def sample_trajectory(
    context: RolloutContext, task: Task, sampling: SamplingSection, group: int, sample: int
) -> Rollout:
    """One rollout of `task`. A scorer that raises, a prompt that leaves no room for an answer or a
    request that takes too long ends it as failed: a reason and no reward."""
    engine = context.engine.describe()
    recorder = _Recorder(f"{group:08d}-{sample:03d}-0")
    started_at = datetime.now(UTC)
    messages = [dict(message) for message in task.messages]
    recorder.context("prompt", 0, context.renderer.prompt(task.messages))
    reward, components, turn = None, None, 0
    num_prompt = len(recorder.token_ids)
    has_room = num_prompt < engine.max_model_tokens
    status, finish_reason = "failed", f"prompt: {num_prompt} tokens leave no room for an answer"
    while has_room:
        try:
            action, finish_reason = await _sample_turn(
                context, recorder, sampling, (group, sample, turn)
            )
        except EngineTimeout as error:
            status, finish_reason = "failed", f"timeout: {error}"
            break
        answer = context.renderer.decode(action)
        messages.append({"role": "assistant", "content": answer})
        try:
            verdict = context.environment.verify(task, answer, turn)
        except ScorerError as error:
            status, finish_reason = "failed", f"scorer: {error}"
            break
        if verdict.done or finish_reason == "length":
            status = "truncated" if finish_reason == "length" else "completed"
            reward, components = verdict.reward, verdict.components
            break
        assert verdict.observation is not None, "a verdict that is not done has an observation"
        observation = context.renderer.bridge(verdict.observation)
        if len(recorder.token_ids) + len(observation) >= engine.max_model_tokens:
            status, finish_reason = "truncated", "context"
            reward, components = verdict.reward, verdict.components
            break
        turn += 1
        recorder.context("observation", turn, observation)
        messages.append({"role": "user", "content": verdict.observation})

    actions = [segment for segment in recorder.segments if segment["kind"] == "action"]
    versions = [segment["weight_version"] for segment in actions]
    trajectory = {
        "trajectory_id": recorder.trajectory_id,
        "group_id": group,
        "sample_index": sample,
        "attempt": 0,
        "task_id": task.task_id,
        "environment": task.environment,
        "split": task.split,
        "parent_trajectory_id": None,
        "status": status,
        "finish_reason": finish_reason,
        "reward": reward,
        "reward_components": None if components is None else list(components.items()),
        "num_sequences": 1,
        "num_turns": turn + 1,
        "num_tokens": len(recorder.token_ids),
        "num_action_tokens": sum(len(segment["token_ids"]) for segment in actions),
        "weight_version_min": min(versions, default=None),
        "weight_version_max": max(versions, default=None),
        "engine_id": recorder.requests[-1]["engine_id"] if recorder.requests else engine.engine_id,
        "engine": engine.engine,
        "sampling": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": sampling.max_tokens,
            "seed": derive_seed(context.run_seed, group, sample, 0, 0),
        },
        "logprobs_mode": engine.logprobs_mode,
        "renderer": context.renderer.name,
        "chat_template_sha256": context.renderer.chat_template_sha256,
        "tokenizer_sha256": context.renderer.tokenizer_sha256,
        "started_at": started_at,
        "finished_at": datetime.now(UTC),
        "messages": json.dumps(messages, ensure_ascii=False),
    }
    routing = recorder.routed.rows(recorder.segments)
    return Rollout(trajectory, recorder.segments, recorder.requests, routing)


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
