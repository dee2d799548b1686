"""The bodies of `/inference/v1/generate`: a request written out, an answer read strictly.

Every sampling parameter is sent, so that neither the server nor the model's folder fills one in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.engines.protocol import (
    EngineLoad,
    FinishReason,
    Generation,
    Request,
    Routing,
    VersionSpan,
)
from tasks.engines.routing import decode_routed_experts

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def payload(request: Request, cache_salt: str | None, max_model_tokens: int) -> dict[str, Any]:
    """The body that asks for `request`; `cache_salt` keeps its cache apart from other salts'.

    A server refuses to be asked for more tokens than fit behind the prompt, so the limit is cut to
    those.
    """
    sampling = request.sampling
    body: dict[str, Any] = {
        "request_id": request.request_id,
        "token_ids": list(request.token_ids),
        "sampling_params": {
            "n": 1,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": min(sampling.max_tokens, max_model_tokens - len(request.token_ids)),
            "min_tokens": 0,
            "seed": sampling.seed,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(request.stop_token_ids),
            # The stop tokens are all given: the model's own must not end a request unseen.
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        },
    }
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    return body


@dataclass(frozen=True)
class Answer:
    """What the server returned; `spans` are (start, end, version) that tile the tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[tuple[int, int, int], ...]
    finish_reason: FinishReason
    num_cached_tokens: int
    drafts: Mapping[str, Any]
    routing: Routing | None

    def generation(
        self,
        *,
        version: int,
        cache_outlives_update: bool,
        queued_s: float,
        decode_s: float,
        engine_id: str,
        load: EngineLoad | None,
    ) -> Generation:
        """The record of a request that was sent under `version`.

        With a cache that outlives updates, the oldest version a token attends to is the one its
        request was sent under; else the one that sampled it.
        """
        return Generation(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            spans=tuple(
                VersionSpan(
                    start, end, sampled_by, version if cache_outlives_update else sampled_by
                )
                for start, end, sampled_by in self.spans
            ),
            finish_reason=self.finish_reason,
            num_cached_tokens=self.num_cached_tokens,
            cached_version_min=version if self.num_cached_tokens else None,
            num_drafted_tokens=self.drafts.get("num_draft_tokens"),
            num_accepted_tokens=self.drafts.get("num_accepted_draft_tokens"),
            queued_s=queued_s,
            prefill_s=None,
            decode_s=decode_s,
            engine_id=engine_id,
            load=load,
            routing=self.routing,
        )


def read_answer(request: Request, body: Mapping[str, Any], versions: Mapping[str, int]) -> Answer:
    """The one choice in a response; `versions` are those attested, by the server's label.

    Raises:
        ValueError, KeyError, TypeError, IndexError: it is not a whole generation of `request`.
    """
    (choice,) = body["choices"]
    token_ids = tuple(choice["token_ids"] or ())
    content = (choice["logprobs"] or {}).get("content") or []
    if [entry["token_id"] for entry in content] != list(token_ids):
        raise ValueError("its log-probabilities are of other tokens than it returned")
    labels = {span["version"] for span in choice["weight_versions"] or ()}
    if unknown := sorted(labels - versions.keys()):
        raise ValueError(f"its weights are labelled {unknown}, attested are {sorted(versions)}")
    spans = tuple(
        (span["start"], span["end"], versions[span["version"]])
        for span in choice["weight_versions"] or ()
    )
    ends = [0, *(end for _, end, _ in spans)]
    if [start for start, _, _ in spans] != ends[:-1] or ends[-1] != len(token_ids):
        raise ValueError(f"its version spans {spans} do not tile {len(token_ids)} tokens")
    if len(token_ids) > request.sampling.max_tokens:
        raise ValueError(f"{len(token_ids)} tokens, {request.sampling.max_tokens} were asked for")
    usage = body["usage"]
    if usage["prompt_tokens"] != len(request.token_ids):
        raise ValueError(f"it saw {usage['prompt_tokens']} prompt tokens")
    details = usage["prompt_tokens_details"]
    experts = choice["routed_experts"]
    return Answer(
        token_ids=token_ids,
        logprobs=tuple(entry["logprob"] for entry in content),
        spans=spans,
        finish_reason=_FINISH_REASONS[choice["finish_reason"]],
        num_cached_tokens=details["cached_tokens"] if details else 0,
        drafts=(body["metrics"] or {}).get("speculative_decoding") or {},
        routing=None
        if experts is None
        else decode_routed_experts(experts, len(request.token_ids), len(token_ids)),
    )
