"""Open or resume a run: its lake, its lease, and version 0."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from schemas.config import RunConfig, changed_keys, parse_recorded_config
from schemas.tables import TABLES
from tasks.environments import Environment, make_environment
from tasks.interchange.imported import imported_from
from tasks.lake.lake import Lake
from tasks.lake.lease import renew_if_due, take_lease
from tasks.lake.ledger import Entry, Ledger
from tasks.publish import publication_row, publish_folder, relative_uri, version_dir
from tasks.renderers import Renderer
from tasks.warm_start import starting_checkpoint
from tasks.weights.importing import check_checkpoint, import_anchor

T = TypeVar("T")

RENEW_S = 5.0

Report = Callable[[dict[str, Any]], None]
"""Takes what happens, as it happens, for whoever watches; nothing depends on it."""


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

    @cached_property
    def environment(self) -> Environment:
        """Raises `ValueError` naming the key that makes none."""
        return make_environment(self.config.environment.name, self.config.environment.options)

    @cached_property
    def renderer(self) -> Renderer:
        """From version 0, once that is published; all versions share its tokenizer.

        Raises `ValueError` if the folder's tokenizer is not the one the run began with.
        """
        folder, _ = published_dir(self, 0)
        renderer = Renderer(folder)
        first = self.ledger.last("version_published", version=0)
        assert first is not None
        for name in ("tokenizer_sha256", "chat_template_sha256"):
            if getattr(renderer, name) != first.details[name]:
                raise ValueError(
                    f"The tokenizer in {folder} is not the one run {self.run_id} began with; "
                    "restore the folder."
                )
        return renderer

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
    run = OpenRun(config, lake, ledger.lease)
    if not ledger.entries:
        run.environment.heldout(config.evaluation.num_tasks)
        report({"event": "opening", "policy": config.policy.model_dump(mode="json")})
        # A warm start may take longer than a lease lives, and needs none.
        check_checkpoint(starting_checkpoint(config))
        ledger.append(
            "run_created",
            lease=0,
            cycle=0,
            details={"config": config.model_dump(mode="json"), "source": source},
        )
    if origin := imported_from(ledger):
        raise ValueError(
            f"{source}: run {config.run.run_id} holds rollouts imported from {origin}, which are "
            "never trained; give this run another run.run_id."
        )
    began_with = parse_recorded_config(
        ledger.entries[0].details["config"], f"the ledger of run {config.run.run_id}"
    )
    if changed := changed_keys(began_with, config):
        raise ValueError(
            f"{source}: run {config.run.run_id} began with other values: {', '.join(changed)}. "
            "Put them back, or give the run another run_id, lake and store."
        )
    return run


def take_run(run: OpenRun, *, take_over: bool = False) -> None:
    """Takes the run's lease and sees that version 0 is published.

    Raises `LeaseHeld` if another controller is at work.
    """
    # Maintenance follows the newest policy, and has no run file to read it from.
    policy = run.config.maintenance.model_dump(mode="json")
    run.lease = take_lease(run.ledger, take_over=take_over, details={"maintenance": policy})
    if run.ledger.last("version_published") is None:
        _publish_version_0(run, starting_checkpoint(run.config))


def _publish_version_0(run: OpenRun, checkpoint: Path) -> None:
    write = partial(import_anchor, checkpoint, lease=run.lease)
    publication = publish_folder(run.config, 0, run.lease, write)
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


async def holding_lease(run: OpenRun, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, which may outlast the lease, and renews the lease meanwhile."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=RENEW_S)
            renew_if_due(run.ledger, run.lease)
    finally:
        task.cancel()
    return task.result()


def published_dir(run: OpenRun, version: int) -> tuple[Path, str]:
    """Where a version's weights lie, and their root hash."""
    entry = run.ledger.last("version_published", version=version)
    assert entry is not None and entry.root_hash is not None, f"version {version} is not published"
    return version_dir(run.config, entry.details["uri"]), entry.root_hash
