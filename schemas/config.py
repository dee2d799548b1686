"""The run TOML: every key, its default, its range and whether it may change on resume.

Unknown keys are refused, because a misspelt key that falls back to a default is a quiet error.
A value that shapes the data is fixed for the life of a run; limits, threads and URLs are marked
`may_change` and may differ when a run is resumed.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from schemas import objective
from schemas.section import MAY_CHANGE, Positive, Section
from schemas.trainer_section import TrainerSection

FLOAT32_TOLERANCE = 0.002


class RunSection(Section):
    """Which run this is and where it lives. Relative paths start at the working directory."""

    run_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    lake: str
    """A directory, or `s3://bucket/prefix`."""
    store: str
    """Weights and checkpoints: a directory, or `s3://bucket/prefix`."""
    cache: Annotated[str, Field(json_schema_extra=MAY_CHANGE)] = "var/cache"
    """Where a machine keeps its copies of what a store in S3 holds, and weights made from patches.
    """
    num_cycles: Annotated[int, Field(gt=0, json_schema_extra=MAY_CHANGE)]
    batches_per_cycle: Positive


class Habit(Section):
    """A second supervised stage, for sums: a teacher who forgets carries.

    The policy then knows how to add but has taken on a habit, so that its first pass@1 hardly
    depends on the seed and rewards have something to train away.
    """

    forgotten_carry_share: Annotated[float, Field(gt=0, lt=1)]
    """Chance that a carry is forgotten."""
    steps: Positive
    learning_rate: Annotated[float, Field(gt=0)]


class WarmStart(Section):
    """A small Qwen3-architecture policy, made here and cached by a hash of all that made it."""

    cache: str = "var/policies"
    num_layers: Positive = 4
    hidden_size: Positive = 128
    intermediate_size: Positive = 384
    num_heads: Positive = 4
    num_kv_heads: Positive = 2
    head_dim: Positive = 32
    vocab_size: Positive = 320
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    num_problems: Positive
    """Training problems whose text the tokenizer and the supervised run see."""
    steps: Positive
    batch_sequences: Positive
    learning_rate: Annotated[float, Field(gt=0)]
    habit: Habit | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0


class PolicySection(Section):
    """Where version 0 comes from: a Hugging Face folder, or a warm start made by the project."""

    path: str | None = None
    warm_start: WarmStart | None = None

    @model_validator(mode="after")
    def _one_source(self):
        if (self.path is None) == (self.warm_start is None):
            raise ValueError(
                "give either path (a Hugging Face folder) or a [policy.warm_start] table"
            )
        return self


class EnvironmentSection(Section):
    name: str
    options: dict[str, Any] = Field(default={})


class VllmSection(Section):
    """vLLM servers: a list of URLs to attach to, or a script that starts them on this machine."""

    urls: list[str] = Field(default=[], json_schema_extra=MAY_CHANGE)
    """They must be able to read `run.store` under the same path."""
    launch: Annotated[str | None, Field(json_schema_extra=MAY_CHANGE)] = None
    """Script that serves a model: called with model folder, port, max_model_tokens, compute_dtype,
    and further vLLM flags. Its servers end with the run."""
    num_servers: Annotated[int, Field(gt=0, json_schema_extra=MAY_CHANGE)] = 1
    """How many servers `launch` starts."""
    prefix_cache: Literal["salt", "clear"] = "salt"
    """What happens to keys and values of old weights at an update. salt: each version has a cache
    of its own, and running requests keep theirs under `keep`. clear: the cache is emptied, and
    running requests are computed again."""
    canary_tokens: Annotated[int, Field(ge=0, json_schema_extra=MAY_CHANGE)] = 64
    """Length of the sequence that attestation recomputes on the controller; 0 attests by hashes
    alone, for models that the controller cannot hold."""
    requests_per_s: Annotated[float | None, Field(gt=0, json_schema_extra=MAY_CHANGE)] = None
    """Requests sent to a server in a second at most; no limit where it is not given."""
    request_timeout_s: Annotated[float, Field(gt=0, json_schema_extra=MAY_CHANGE)] = 600.0
    """A request that takes longer ends its rollout as failed."""
    startup_timeout_s: Annotated[float, Field(gt=0, json_schema_extra=MAY_CHANGE)] = 600.0
    """How long a server may take to start, and rollouts wait while no server is in traffic."""
    colocated: bool = False
    """The servers share their devices with the trainer: they sleep while it works."""

    @model_validator(mode="after")
    def _one_source(self):
        if bool(self.urls) == (self.launch is not None):
            raise ValueError(
                'give either urls = ["http://host:8000"] or launch = "infra/vllm/serve-cpu.sh"'
            )
        if self.urls and self.num_servers != 1:
            raise ValueError("num_servers is for launch; with urls, list each server")
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError("urls names a server twice; each stands for one engine")
        if self.canary_tokens == 1:
            raise ValueError("canary_tokens = 1 compares nothing; give 0 or at least 2")
        return self


class EngineSection(Section):
    backend: Literal["torch", "vllm"] = "torch"
    num_slots: Annotated[int, Field(gt=0, json_schema_extra=MAY_CHANGE)] = 256
    """Requests that decode together, in each engine."""
    max_model_tokens: Positive
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    threads: Annotated[int, Field(gt=0, json_schema_extra=MAY_CHANGE)] = 2
    logprob_tolerance: Annotated[float, Field(gt=0, json_schema_extra=MAY_CHANGE)] = (
        FLOAT32_TOLERANCE
    )
    """Largest |log pi - log mu| that rounding alone explains. The default is for float32 on both
    sides; with float16 in the trainer about 0.02, with bfloat16 on either side 0.05 to 0.1."""
    vllm: VllmSection | None = None

    @model_validator(mode="after")
    def _servers_where_due(self):
        if (self.backend == "vllm") != (self.vllm is not None):
            raise ValueError('backend = "vllm" and an [engine.vllm] table belong together')
        return self


class SamplingSection(Section):
    """All of them, always sent: a model's own generation config never fills one in."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    allow_truncation: bool = False
    """The policy optimised is the truncated one: the trainer cuts and renormalises as the engine
    did. Without it top_p, top_k and min_p must be off."""
    max_tokens: Positive

    @property
    def truncates(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


class BatchSection(Section):
    trajectories: Positive
    group_size: Annotated[int, Field(ge=2)]
    minibatches: Positive = 1

    @model_validator(mode="after")
    def _whole_groups(self):
        if self.trajectories % self.group_size:
            raise ValueError(
                f"trajectories = {self.trajectories} is not a multiple of group_size = "
                f"{self.group_size}: a batch holds whole groups"
            )
        if self.trajectories % self.minibatches:
            raise ValueError(
                f"trajectories = {self.trajectories} is not a multiple of minibatches = "
                f"{self.minibatches}: minibatches have equal size"
            )
        return self

    @property
    def num_groups(self) -> int:
        return self.trajectories // self.group_size


class AsynchronySection(Section):
    """How far sampling may run ahead (k batches) and how stale a trained token may be (max_lag)."""

    k: Annotated[int, Field(ge=0, json_schema_extra=MAY_CHANGE)] = 0
    max_lag: Annotated[int | None, Field(ge=0, json_schema_extra=MAY_CHANGE)] = None
    """In weight versions; k where it is not given."""
    order: Literal["finish", "start"] = "finish"
    update: Annotated[Literal["wait", "keep", "abort"], Field(json_schema_extra=MAY_CHANGE)] = (
        "wait"
    )

    @property
    def lag_bound(self) -> int:
        return self.k if self.max_lag is None else self.max_lag


class PublicationSection(Section):
    """How versions are kept in `run.store`; each is rebuilt bit for bit or refused."""

    anchor_every: Annotated[int, Field(gt=0, json_schema_extra=MAY_CHANGE)] = 1
    """Versions 0, N, 2N … are anchors, whole Hugging Face folders; those between are patches on the
    version before. 1 keeps every version whole."""


class GatesSection(Section):
    """Limits of the gates; a resumed run may have others."""

    reward_min: Annotated[float, Field(json_schema_extra=MAY_CHANGE)] = 0.0
    reward_max: Annotated[float, Field(json_schema_extra=MAY_CHANGE)] = 1.0
    off_factor: Annotated[float, Field(gt=1, json_schema_extra=MAY_CHANGE)] = 2.0
    """A token off by more than this factor counts in the share that gate 2 bounds."""
    max_share_off: Annotated[float, Field(gt=0, le=1, json_schema_extra=MAY_CHANGE)] = 0.1
    """Largest share of such tokens in a batch."""
    drift_batches: Annotated[int, Field(ge=5, json_schema_extra=MAY_CHANGE)] = 10
    """Accepted batches that gate 2 compares a batch's length, reward, entropy, zero-variance groups
    and log w with; the first ones of a run have no such comparison."""

    @model_validator(mode="after")
    def _a_range(self):
        if self.reward_min >= self.reward_max:
            raise ValueError(
                f"reward_min = {self.reward_min} is not below reward_max = {self.reward_max}"
            )
        return self


class EvaluationSection(Section):
    num_tasks: Positive = 512
    num_samples: Positive = 1
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    pass_reward: float = 1.0
    """A rollout passes when its reward is at least this."""


Days = Annotated[float | None, Field(gt=0, json_schema_extra=MAY_CHANGE)]


class MaintenanceSection(Section):
    """How long `rollhouse maintain` keeps what takes the most room. Rows expire by whole closed
    cycles, once each trajectory in them is trained and published, dropped, or held out. A resumed
    run may have another policy; what is gone stays gone. Every other table, and every version of
    the weights, is kept for good."""

    routing_days: Days = None
    """Age at which rows of `routing` expire; kept for good where it is not given."""
    tokens_days: Days = None
    """The same for `segments` and `scores`, and with them the views over tokens."""
    requests_days: Days = None
    """The same for `requests`."""
    keep_checkpoints: Annotated[int | None, Field(gt=0, json_schema_extra=MAY_CHANGE)] = None
    """Checkpoints kept, the newest ones; all of them where it is not given. The newest one is what
    the run goes on from; older ones save `rollhouse replay` a longer way."""
    grace_hours: Annotated[float, Field(ge=1, le=672, json_schema_extra=MAY_CHANGE)] = 168.0
    """How long writes stay that no ledger row names, and files that no table holds any more: what
    runs or reads for longer than this may lose files under its feet."""


class RunConfig(Section):
    run: RunSection
    policy: PolicySection
    environment: EnvironmentSection
    engine: EngineSection
    sampling: SamplingSection
    batch: BatchSection
    asynchrony: AsynchronySection = AsynchronySection()
    trainer: TrainerSection
    publication: PublicationSection = PublicationSection()
    gates: GatesSection = GatesSection()
    evaluation: EvaluationSection = EvaluationSection()
    maintenance: MaintenanceSection = MaintenanceSection()

    @model_validator(mode="after")
    def _coherent(self):
        if self.sampling.truncates and not self.sampling.allow_truncation:
            raise ValueError(
                "sampling: top_p, top_k and min_p must be off (1.0, 0, 0.0), because tokens that "
                "they cut away get no gradient; set sampling.allow_truncation = true to train the "
                "truncated distribution instead of the whole one"
            )
        if self.asynchrony.lag_bound < self.asynchrony.k and self.asynchrony.order == "start":
            raise ValueError(
                'asynchrony: max_lag below k with order = "start" drops the rollouts it waits '
                'for; raise max_lag or use order = "finish"'
            )
        if self.trainer.audit_fraction == 0 and self.asynchrony.lag_bound > 0:
            raise ValueError(
                "trainer.audit_fraction: 0 leaves stale tokens unaudited, and gate 2 refuses what "
                "it cannot compare; give a share above 0"
            )
        narrow = {self.engine.compute_dtype, self.trainer.compute_dtype} - {"float32"}
        if narrow and self.engine.logprob_tolerance <= FLOAT32_TOLERANCE:
            raise ValueError(
                f"engine.logprob_tolerance = {self.engine.logprob_tolerance} is for engine and "
                "trainer in float32; gate 2 would take the rounding of "
                f"{' and '.join(sorted(narrow))} for a fault, so give about 0.02 for float16 and "
                "0.1 for bfloat16"
            )
        in_minibatch = self.batch.trajectories // self.batch.minibatches
        if self.trainer.reduction == "group" and in_minibatch % self.batch.group_size:
            raise ValueError(
                f'trainer.reduction = "group": minibatches of {in_minibatch} trajectories cut '
                f"groups of {self.batch.group_size}; lower batch.minibatches or give another "
                "reduction"
            )
        for temperature in (self.sampling.temperature, self.evaluation.temperature):
            if self.engine.backend == "vllm" and not 0.01 <= temperature <= 2:
                raise ValueError(
                    f"sampling: vLLM takes temperatures from 0.01 to 2, and {temperature} is asked "
                    "for; change it"
                )
        if self.engine.vllm is not None and self.engine.vllm.colocated and self.asynchrony.k > 0:
            raise ValueError(
                "engine.vllm.colocated: servers sleep while the trainer works, so nothing can be "
                "sampled meanwhile; set asynchrony.k = 0 or give the servers devices of their own"
            )
        num_steps = self.run.num_cycles * self.run.batches_per_cycle * self.batch.minibatches
        if reason := objective.steps_without_a_rate(self.trainer, num_steps):
            raise ValueError(f"trainer.decay_steps: {reason}")
        if self.sampling.max_tokens >= self.engine.max_model_tokens:
            raise ValueError(
                f"sampling.max_tokens = {self.sampling.max_tokens} leaves no room for a prompt in "
                f"engine.max_model_tokens = {self.engine.max_model_tokens}; lower the first or "
                "raise the second"
            )
        return self


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """Keys of the section that holds the unknown key at `location`."""
    model: Any = RunConfig
    for part in location[:-1]:
        annotation = model.model_fields[str(part)].annotation
        options = getattr(annotation, "__args__", (annotation,))
        model = next(option for option in options if isinstance(option, type))
    return list(model.model_fields)


def _sentence(error: Mapping[str, Any], source: str) -> str:
    key = ".".join(str(part) for part in error["loc"]) or "the file"
    if error["type"] == "extra_forbidden":
        known = ", ".join(_known_keys(error["loc"]))
        return f"{source}: unknown key {key}; remove it or use one of: {known}."
    if error["type"] == "missing":
        return f"{source}: {key} is missing; add it."
    message = error["msg"].removeprefix("Value error, ")
    given = "" if isinstance(error["input"], dict) else f" (given {error['input']!r})"
    return f"{source}: {key}: {message[0].lower()}{message[1:]}{given}."


def parse_run_config(data: Mapping[str, Any], source: str) -> RunConfig:
    """A run configuration from parsed TOML.

    Raises `ValueError` with one sentence a fault, each naming `source`, the key and the fix.
    """
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ValueError("\n".join(_sentence(e, source) for e in error.errors())) from None


def parse_recorded_config(data: Mapping[str, Any], source: str) -> RunConfig:
    """The configuration that a run's ledger keeps; `ValueError` as `parse_run_config`."""
    return parse_run_config(
        {**data, "trainer": objective.without_idle_options(data["trainer"])}, source
    )


def parse_maintenance(data: Mapping[str, Any], source: str) -> MaintenanceSection:
    """A maintenance policy from the keys of its section; `ValueError` as `parse_run_config`."""
    try:
        return MaintenanceSection.model_validate(data)
    except ValidationError as error:
        faults = [{**e, "loc": ("maintenance", *e["loc"])} for e in error.errors()]
        raise ValueError("\n".join(_sentence(fault, source) for fault in faults)) from None


def _leaves(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            extra = field.json_schema_extra or {}
            yield f"{prefix}{name}", value, extra == MAY_CHANGE


def changed_keys(old: RunConfig, new: RunConfig) -> list[str]:
    """Keys that differ and may not change on resume, as `section.key (old -> new)`.

    Where a file does not give trainer.routing_replay, it is as the run began: older ones did not
    know it, and trained without.
    """
    before = {key: value for key, value, _ in _leaves(old)}
    after = {key: (value, may_change) for key, value, may_change in _leaves(new)}
    changed = []
    for key in sorted(before.keys() | after.keys()):
        value, may_change = after.get(key, (None, False))
        if key == "trainer.routing_replay":
            may_change = "routing_replay" not in new.trainer.model_fields_set
        if not may_change and before.get(key) != value:
            changed.append(f"{key} ({before.get(key)!r} -> {value!r})")
    return changed
