"""Writes down the tokens of one trajectory as they are sampled and given."""

from dataclasses import dataclass, field
from typing import Any, Literal

from tasks.engines.protocol import Generation
from tasks.routed_tokens import RoutedTokens

Row = dict[str, Any]


@dataclass
class Recorder:
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
