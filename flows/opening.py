"""Open or resume a run: its lake, its lease, version 0, and an engine that proved itself."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from schemas.config import RunConfig, changed_keys, parse_run_config
from schemas.tables import TABLES
from tasks.engines.probe import ProbeResult, probe
from tasks.engines.protocol import RolloutEngine
from tasks.environments import make_environment
from tasks.lake.lake import Lake
from tasks.lake.lease import take_lease
from tasks.lake.ledger import Entry, Ledger
from tasks.publish import publication_row, relative_uri, version_dir
from tasks.renderers import Renderer
from tasks.rollout import RolloutContext
from tasks.train import run_store
from tasks.warm_start import starting_checkpoint
from tasks.weights.importing import check_checkpoint, import_anchor

Report = Callable[[dict[str, Any]], None]
"""Takes what happens, as it happens, for whoever watches; nothing depends on it."""


class EngineRefused(RuntimeError):
    """The engine failed its probe or could not attest the weights it should serve."""


@dataclass
class OpenRun:
    """A run under our lease.

    `pending` are writes that the next ledger row of any kind will name: attestations and probes,
    which gate traffic but never hold back a commit.
    """

    config: RunConfig
    lake: Lake
    lease: int
    cycle: int = 0
    pending: list[str] = field(default_factory=list)

    @property
    def run_id(self) -> str:
        return self.config.run.run_id

    @property
    def ledger(self) -> Ledger:
        return self.lake.ledger(self.run_id)

    def append(self, table: str, rows: list[dict[str, Any]] | pa.Table) -> str:
        if isinstance(rows, list):
            rows = pa.Table.from_pylist(rows, schema=TABLES[table].own_schema)
        return self.lake.append(table, rows, run_id=self.run_id, cycle=self.cycle, lease=self.lease)

    def commit(self, kind: str, *, write_ids: tuple[str, ...] = (), **columns: Any) -> Entry:
        pending, self.pending = self.pending, []
        return self.ledger.append(
            kind,
            lease=self.lease,
            cycle=self.cycle,
            write_ids=(*pending, *write_ids),
            **columns,
        )


def find_run(config: RunConfig, source: str, report: Report) -> OpenRun:
    """Creates the run or finds it, without its lease.

    A run is created once its environment and its starting checkpoint are known to be good, since
    from then on its configuration is fixed.

    Raises `ValueError` if they are not, or if the configuration differs from the run's in a key
    that may not change.
    """
    lake = Lake.create(config.run.lake)
    ledger = lake.ledger(config.run.run_id)
    if not ledger.entries:
        environment = make_environment(config.environment.name, config.environment.options)
        environment.heldout(config.evaluation.num_tasks)
        report({"event": "opening", "policy": config.policy.model_dump(mode="json")})
        # A warm start may take longer than a lease lives, and needs none.
        check_checkpoint(starting_checkpoint(config))
        ledger.append(
            "run_created",
            lease=0,
            cycle=0,
            details={"config": config.model_dump(mode="json"), "source": source},
        )
    began_with = parse_run_config(
        ledger.entries[0].details["config"], f"the ledger of run {config.run.run_id}"
    )
    if changed := changed_keys(began_with, config):
        raise ValueError(
            f"{source}: run {config.run.run_id} began with other values: {', '.join(changed)}. "
            "Put them back, or give the run another run_id, lake and store."
        )
    return OpenRun(config, lake, ledger.lease)


def take_run(run: OpenRun, *, take_over: bool = False) -> None:
    """Takes the run's lease and sees that version 0 is published.

    Raises `LeaseHeld` if another controller is at work.
    """
    run.lease = take_lease(run.ledger, take_over=take_over)
    if run.ledger.last("version_published") is None:
        _publish_version_0(run, starting_checkpoint(run.config))


def _publish_version_0(run: OpenRun, checkpoint: Path) -> None:
    publication = import_anchor(checkpoint, run_store(run.config) / "weights", lease=run.lease)
    renderer = Renderer(Path(publication.uri))
    run.commit(
        "version_published",
        version=0,
        root_hash=publication.root_hash,
        write_ids=(run.append("publications", [publication_row(run.config, publication)]),),
        details={
            "uri": relative_uri(run.config, publication),
            "tokenizer_sha256": renderer.tokenizer_sha256,
            "chat_template_sha256": renderer.chat_template_sha256,
        },
    )


def published_dir(run: OpenRun, version: int) -> tuple[Path, str]:
    """Where a version's weights lie, and their root hash."""
    entry = run.ledger.last("version_published", version=version)
    assert entry is not None and entry.root_hash is not None, f"version {version} is not published"
    return version_dir(run.config, entry.details["uri"]), entry.root_hash


async def serve(run: OpenRun, engine: RolloutEngine, version: int) -> None:
    """Has the engine load and attest `version`; raises `EngineRefused` if it cannot."""
    weights_dir, root_hash = published_dir(run, version)
    attestation = await engine.update(version, weights_dir, root_hash, run.config.asynchrony.update)
    row = {
        "engine_id": attestation.engine_id,
        "version": attestation.version,
        "root_hash": attestation.root_hash,
        "canary_max_abs_diff": None,
        "ok": attestation.ok,
        "reason": attestation.reason,
        "seconds": attestation.seconds,
        "attested_at": datetime.now(UTC),
    }
    run.pending.append(run.append("attestations", [row]))
    if not attestation.ok:
        run.commit("lease_renewed")  # Names what the engine said, which nothing else would.
        raise EngineRefused(
            f"Engine {attestation.engine_id} could not attest version {version}: "
            f"{attestation.reason}; no request was sent to it. Run again to retry."
        )


async def attach(run: OpenRun, engine: RolloutEngine) -> RolloutContext:
    """Serves the newest version on a new engine, probes it, and stores what the probe saw."""
    published = run.ledger.last("version_published")
    assert published is not None and published.version is not None
    await serve(run, engine, published.version)
    first = run.ledger.last("version_published", version=0)
    assert first is not None
    renderer = Renderer(published_dir(run, 0)[0])
    for name in ("tokenizer_sha256", "chat_template_sha256"):
        if getattr(renderer, name) != first.details[name]:
            raise ValueError(
                f"The tokenizer in {published_dir(run, 0)[0]} is not the one run {run.run_id} "
                "began with; restore the folder."
            )
    environment = make_environment(run.config.environment.name, run.config.environment.options)
    prompt = renderer.prompt(environment.heldout(1)[0].messages)
    result = await _probe_where_uncertain(run, engine, renderer, published.version, prompt)
    run.pending.append(run.append("validations", _probe_rows(result)))
    if not result.ok:
        run.commit("lease_renewed")
        raise EngineRefused(f"The engine is not attached: {result.reason}")
    return RolloutContext(engine, environment, renderer, run.config.run.seed)


async def _probe_where_uncertain(
    run: OpenRun, engine: RolloutEngine, renderer: Renderer, version: int, prompt: list[int]
) -> ProbeResult:
    """Probes on prefixes of a prompt until one leaves the policy in doubt.

    A trained policy may be certain of its answers, and then no temperature shows.
    """
    for length in (len(prompt), len(prompt) // 2, 2, 1):
        result = await probe(
            engine,
            prompt_token_ids=tuple(prompt[:length]),
            vocab_size=renderer.vocab_size,
            weight_version=version,
            tolerance=run.config.engine.logprob_tolerance,
        )
        only_certain = [check.name for check in result.checks if not check.ok] == [
            "temperature_matters"
        ]
        if not only_certain:
            break
    return result


def _probe_rows(result: ProbeResult) -> list[dict[str, Any]]:
    now = datetime.now(UTC)
    return [
        {
            "gate": 0,
            "rule": f"probe_{check.name}",
            "severity": "batch",
            "scope": result.engine_id,
            "observed": None,
            "expected": f"{check.expected} (observed: {check.observed})",
            "ok": check.ok,
            "num_failed": int(not check.ok),
            "judged_at": now,
        }
        for check in result.checks
    ]
