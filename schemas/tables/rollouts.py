"""Tables that rollout generation writes: trajectories, segments, routing and requests."""

import pyarrow as pa

from schemas.tables.table import TIMESTAMP, Table, optional, required

TRAJECTORY_ID = required(
    "trajectory_id",
    pa.string(),
    "`{group:08d}-{sample:03d}-{attempt}`, so that a retry is recognised as one.",
)
SEQUENCE_INDEX = required(
    "sequence_index",
    pa.int16(),
    "Sequence within the trajectory, from 0. A second one opens where a turn's prompt no longer "
    "begins with what came before it, so no gradient is taken in a context never seen.",
)
SEGMENT_INDEX = required("segment_index", pa.int32(), "Segment within the sequence, from 0.")

KINDS = ("prompt", "action", "observation", "summary")
STATUSES = ("completed", "truncated", "aborted", "failed")
SPLITS = ("train", "heldout")
ORIGINS = ("verl", "trl", "prime-rl")
DRIFTS = ("clean", "realign", "fork")


def _one_of(column: str, values: tuple[str, ...]) -> str:
    listed = ", ".join(f"'{value}'" for value in values)
    return f"{column} IS NULL OR {column} IN ({listed})"


SEGMENTS = Table(
    name="segments",
    description="Every token of every rollout: one row a run of tokens of one sequence with one "
    "kind, one turn and one weight version.",
    columns=(
        TRAJECTORY_ID,
        SEQUENCE_INDEX,
        SEGMENT_INDEX,
        required(
            "start_position",
            pa.int32(),
            "Position in the sequence of the segment's first token, from 0; shows a lost or "
            "doubled segment.",
        ),
        required("turn_index", pa.int16(), "Turn within the trajectory, from 0."),
        required(
            "kind",
            pa.string(),
            "prompt, action, observation or summary. Only action tokens were sampled by the "
            "policy, and only they may carry a gradient.",
        ),
        optional(
            "weight_version",
            pa.int64(),
            "Weight version that produced the tokens' logits; NULL unless action, and where an "
            "import does not know it. Staleness is measured from it.",
        ),
        optional(
            "kv_version_min",
            pa.int64(),
            "Oldest weight version behind any cache entry the tokens attended to; NULL unless "
            "action, and in imports. Below weight_version after a `keep` update in flight.",
        ),
        required(
            "token_ids", pa.list_(pa.int32()), "Token ids as sampled or sent, never re-encoded."
        ),
        optional(
            "rollout_logprobs",
            pa.list_(pa.float32()),
            "Natural log of the probability each token was really drawn at (after temperature and "
            "truncation), as long as token_ids; NULL unless action, and where an import does not "
            "know it. The denominator of every importance weight.",
        ),
    ),
    sort_by=("trajectory_id", "sequence_index", "segment_index"),
    byte_stream_split=("rollout_logprobs.list.element",),
    dictionary=("trajectory_id", "kind", "turn_index", "weight_version", "kv_version_min"),
    checks={"kind_known": _one_of("kind", KINDS)},
)

ROUTING = Table(
    name="routing",
    description="Experts chosen by a mixture-of-experts engine, one row an action or context "
    "segment, for replay in the trainer's forward pass. A token forwarded by several requests has "
    "the experts of the first: of the pass whose logits drew the token after it.",
    columns=(
        TRAJECTORY_ID,
        SEQUENCE_INDEX,
        SEGMENT_INDEX,
        required(
            "num_layers",
            pa.int16(),
            "Layers in each row of `experts`: the routed ones (torch engine), or all of the "
            "model's, those without a router holding zeros (vLLM).",
        ),
        required("top_k", pa.int16(), "Experts chosen a token and layer."),
        required(
            "dtype", pa.string(), "Element type of `experts`: uint8 or uint16, little endian."
        ),
        required(
            "num_rows",
            pa.int32(),
            "Tokens with routing. May be short of the segment's tokens only at its end: the last "
            "sampled token was never forwarded, and a missing row is missing, never expert 0.",
        ),
        required("experts", pa.binary(), "Row-major rows x layers x top_k expert indices."),
    ),
    sort_by=("trajectory_id", "sequence_index", "segment_index"),
    dictionary=("trajectory_id", "dtype"),
)

_SAMPLING = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int32()),
        ("min_p", pa.float64()),
        ("max_tokens", pa.int32()),
        ("seed", pa.int64()),
    ]
)

TRAJECTORIES = Table(
    name="trajectories",
    description="One row a rollout: what was asked, how it ended, what it earned. Of an imported "
    "rollout, what its source does not say is NULL in any column but the identifiers.",
    columns=(
        TRAJECTORY_ID,
        required("group_id", pa.int64(), "Group of rollouts of one task, in dispatch order."),
        required("sample_index", pa.int32(), "Rollout within the group, from 0."),
        required("attempt", pa.int32(), "0 unless the rollout was sampled again after a failure."),
        required(
            "task_id",
            pa.string(),
            "Hash of the problem's text; train and held-out never share one.",
        ),
        required("environment", pa.string(), "Name of the environment that scored it."),
        required("split", pa.string(), "train or heldout; only train rollouts are admitted."),
        optional(
            "parent_trajectory_id", pa.string(), "Trajectory that delegated to it; NULL for a root."
        ),
        required("status", pa.string(), "completed, truncated (a length cap), aborted or failed."),
        required(
            "finish_reason",
            pa.string(),
            "The last turn's: stop, length or abort; context where the next observation had no "
            "room in the model; or the failure.",
        ),
        optional(
            "reward",
            pa.float64(),
            "Return of the whole rollout; NULL if it failed, never 0 for a failure.",
        ),
        optional(
            "reward_components",
            pa.map_(pa.string(), pa.float64()),
            "Parts of the reward by name; NULL if it failed.",
        ),
        required(
            "num_sequences", pa.int32(), "Sequences: 1 while every turn extends the one before."
        ),
        required("num_turns", pa.int32(), "Policy actions taken."),
        required("num_tokens", pa.int32(), "Tokens over all sequences; checked against segments."),
        required("num_action_tokens", pa.int32(), "Sampled tokens; checked against segments."),
        optional(
            "weight_version_min",
            pa.int64(),
            "Oldest version that sampled a token; NULL if none was.",
        ),
        optional(
            "weight_version_max",
            pa.int64(),
            "Newest version that sampled a token; NULL if none was.",
        ),
        required("engine_id", pa.string(), "Engine that served its last request."),
        required("engine", pa.string(), "Engine build; a change in mid run is a fault to notice."),
        required(
            "sampling",
            _SAMPLING,
            "Every sampling parameter of its first turn, as sent. The seed is the rollout's.",
        ),
        required(
            "logprobs_mode",
            pa.string(),
            "processed_logprobs where the engine proved it at attach time.",
        ),
        required("renderer", pa.string(), "How messages became tokens."),
        required(
            "chat_template_sha256",
            pa.string(),
            "Hash of the chat template; a change breaks contexts.",
        ),
        required("tokenizer_sha256", pa.string(), "Hash of the tokenizer; a change breaks ids."),
        required("started_at", TIMESTAMP, "First request sent."),
        required("finished_at", TIMESTAMP, "Scored, or failed."),
        required(
            "messages", pa.string(), "The conversation as JSON text, for people; never re-encoded."
        ),
        optional(
            "origin",
            pa.string(),
            "Framework that sampled it, for an imported rollout: verl, trl or prime-rl; NULL for "
            "one sampled here. Only rollouts sampled here are ever trained.",
        ),
        optional(
            "origin_details",
            pa.string(),
            "Fields of the imported record that no column holds, as JSON text; NULL for a rollout "
            "sampled here.",
        ),
    ),
    sort_by=("trajectory_id",),
    dictionary=(
        "environment",
        "split",
        "status",
        "finish_reason",
        "engine_id",
        "engine",
        "logprobs_mode",
        "renderer",
        "chat_template_sha256",
        "tokenizer_sha256",
        "task_id",
        "origin",
    ),
    checks={
        "split_known": _one_of("split", SPLITS),
        "status_known": _one_of("status", STATUSES),
        "origin_known": _one_of("origin", ORIGINS),
    },
)

REQUESTS = Table(
    name="requests",
    description="One row an engine call; a turn takes several when an update aborts it.",
    columns=(
        TRAJECTORY_ID,
        required("turn_index", pa.int16(), "Turn within the trajectory, from 0."),
        required(
            "part_index",
            pa.int16(),
            "Request within the turn, from 0; more than one after an abort.",
        ),
        required("num_prompt_tokens", pa.int32(), "Tokens sent."),
        required("num_cached_tokens", pa.int32(), "Prompt tokens served from a prefix cache."),
        required("num_output_tokens", pa.int32(), "Tokens sampled."),
        optional(
            "num_drafted_tokens", pa.int32(), "Speculative tokens proposed; NULL without a drafter."
        ),
        optional(
            "num_accepted_tokens",
            pa.int32(),
            "Speculative tokens accepted; NULL without a drafter.",
        ),
        required("finish_reason", pa.string(), "stop, length or abort."),
        required(
            "drift", pa.string(), "How the prompt continued the sequence: clean, realign or fork."
        ),
        required(
            "queued_s",
            pa.float64(),
            "Seconds until a slot of the torch engine, or until it was sent to a server.",
        ),
        optional(
            "prefill_s",
            pa.float64(),
            "Seconds of prompt computation; NULL where the engine does not tell it apart.",
        ),
        required(
            "decode_s",
            pa.float64(),
            "Seconds from first to last token; from sending to the answer where prefill_s is NULL.",
        ),
        required("engine_id", pa.string(), "Engine that served it."),
        optional(
            "cached_version_min",
            pa.int64(),
            "Oldest version behind the cached prefix; NULL if none.",
        ),
        optional(
            "kv_cache_usage",
            pa.float64(),
            "Share of the server's KV cache in use about when the request ended; NULL for an "
            "engine that does not report it. Near 1, requests wait or are preempted.",
        ),
        optional(
            "num_preemptions",
            pa.int64(),
            "Requests the server has preempted since it started; NULL as for kv_cache_usage. "
            "Growth means a cache too small for num_slots.",
        ),
        optional(
            "prefix_hit_rate",
            pa.float64(),
            "Share of prompt tokens since the server's start that its prefix cache held; NULL as "
            "for kv_cache_usage, and before the first prompt.",
        ),
    ),
    sort_by=("trajectory_id", "turn_index", "part_index"),
    byte_stream_split=("queued_s", "prefill_s", "decode_s"),
    dictionary=("trajectory_id", "finish_reason", "drift", "engine_id"),
    checks={"drift_known": _one_of("drift", DRIFTS)},
)
