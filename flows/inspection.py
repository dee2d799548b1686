"""What the inspecting commands show, as JSON-ready rows read from the lake.

What loads torch or a tokenizer is imported by the one function that needs it, so that the others
answer at once.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import duckdb

from schemas.config import RunConfig, parse_recorded_config
from tasks.decisions import undecided
from tasks.lake.lake import Lake
from tasks.lake.ledger import Entry
from tasks.progress import read_progress
from tasks.query import connect, connect_as_of, table_history

if TYPE_CHECKING:
    from tasks.weights.store import RunStore


def run_config(lake: Lake, run_id: str) -> RunConfig:
    """The configuration that the run began with."""
    details = lake.ledger(run_id).entries[0].details
    return parse_recorded_config(details["config"], f"the ledger of run {run_id}")


def _run_store(lake: Lake, run_id: str) -> "RunStore":
    """The store of a run. Raises `ValueError` if there is none where its run file says."""
    from tasks.weights.store import open_store

    config = run_config(lake, run_id)
    store = open_store(config)
    if not store.is_there():
        raise ValueError(
            f"{store.folder} is not there. The run's store is {config.run.store!r}, which a "
            "relative path looks up from the working directory: call from where the run was "
            "started."
        )
    return store


def run_status(lake: Lake, run_id: str) -> dict[str, Any]:
    ledger = lake.ledger(run_id)
    progress = read_progress(lake, run_id)
    holder = ledger.last("lease_taken")
    newest = ledger.entries[-1]
    refused = undecided(ledger.entries)
    attested = lake.read(
        "attestations", run_id=run_id, columns=["engine_id", "version"], where="ok"
    ).to_pylist()
    engines = {row["engine_id"]: row["version"] for row in attested}
    waits = "nothing"
    if refused:
        waits = f"a decision on refusal {refused[0].seq}"
    elif progress.open_admission is not None:
        state = "training" if progress.accepted else "scores"
        waits = f"batch {progress.open_admission.batch} ({state})"
    return {
        "run_id": run_id,
        "cycles_closed": sum(e.kind == "cycle_closed" for e in ledger.entries),
        "batches_trained": progress.batches_trained,
        "published_version": progress.published_version,
        "engines": ", ".join(f"{name} at {version}" for name, version in engines.items()),
        "waiting_for": waits,
        "groups_waiting": len(progress.finished),
        "open_refusal": refused[0].details["reason"] if refused else None,
        "lease": None
        if holder is None
        else f"{holder.seq} (pid {holder.details['pid']} on {holder.details['host']})",
        "last_row": f"{newest.kind} at {newest.committed_at:%Y-%m-%d %H:%M:%S} UTC",
    }


def connection_for(lake: Lake, run_id: str | None, as_of: int | None) -> duckdb.DuckDBPyConnection:
    """The lake as it is now, or a run of it as of a ledger row.

    Raises `ValueError` for a run without a row to go back to, or a row that is not there.
    """
    if as_of is None and run_id is not None:
        raise ValueError("--run goes with --as-of; without it a query sees every run.")
    if as_of is None or run_id is None:
        return connect(lake)
    return connect_as_of(lake, run_id, as_of)


def history_of(lake: str | None, table: str) -> list[dict[str, Any]]:
    """The Delta versions of a table. Raises `ValueError` without a lake or for another name."""
    if lake is None:
        raise ValueError("--history needs --lake: a table's versions are those of one lake.")
    return table_history(Lake.open(lake), table)


def publications(lake: Lake, run_id: str) -> list[dict[str, Any]]:
    return lake.read(
        "publications",
        run_id=run_id,
        columns=[
            "version",
            "parent",
            "kind",
            "bytes",
            "num_changed",
            "num_parameters",
            "root_hash",
            "seconds",
            "uri",
        ],
    ).to_pylist()


def _published(lake: Lake, run_id: str, version: int | None) -> list[Entry]:
    """Ledger rows of all published versions, or of one. Raises `ValueError` if there is none."""
    ledger = lake.ledger(run_id)
    entries = [entry for entry in ledger.entries if entry.kind == "version_published"]
    known = f"0 to {entries[-1].version}" if entries else "none"
    found = [entry for entry in entries if version in (None, entry.version)]
    if not found:
        asked = "any version" if version is None else f"version {version}"
        raise ValueError(f"Run {run_id} has not published {asked}; it has {known}.")
    return found


def verify_versions(lake: Lake, run_id: str, version: int | None) -> Iterator[dict[str, Any]]:
    """For each version, or one, whether the store holds it bit for bit as the ledger names it.

    Raises `ValueError` if there is no such version.
    """
    from tasks.weights.versions import verify

    entries = _published(lake, run_id, version)
    found = verify(_run_store(lake, run_id), [entry.details["uri"] for entry in entries])
    for entry, held in zip(entries, found, strict=True):
        fault = held.fault
        if fault is None and held.root_hash != entry.root_hash:
            fault = f"it holds root hash {held.root_hash}, the ledger has {entry.root_hash}"
        yield {
            "version": entry.version,
            "kind": None if held.patches is None else "patch" if held.patches else "anchor",
            "patches": held.patches,
            "ok": fault is None,
            "fault": fault,
            "seconds": round(held.seconds, 3),
        }


def export_version(lake: Lake, run_id: str, version: int, to_dir: Path) -> dict[str, Any]:
    """Writes a version as a Hugging Face folder, every tensor verified.

    Raises `ValueError` if there is no such version, or the store no longer holds what the ledger
    names.
    """
    from tasks.weights.folders import MANIFEST, load_publication
    from tasks.weights.versions import export

    entry = _published(lake, run_id, version)[0]
    store = _run_store(lake, run_id)
    folder = store.get(entry.details["uri"], MANIFEST)
    publication = load_publication(folder)
    if publication.root_hash != entry.root_hash:
        raise ValueError(
            f"{folder} holds root hash {publication.root_hash}, but the ledger published "
            f"{entry.root_hash} as version {version}; restore the store from a backup."
        )
    return {
        "version": version,
        "root_hash": publication.root_hash,
        "path": str(export(store, entry.details["uri"], to_dir)),
    }


def trajectory_tokens(lake: Lake, run_id: str, trajectory_id: str | None) -> dict[str, Any]:
    """One trajectory with its tokens; by default the last one that was trained.

    Raises `ValueError` if the run has no such trajectory.
    """
    from tasks.renderers import Renderer

    connection = connect(lake)
    if trajectory_id is None:
        row = connection.execute(
            "SELECT trajectory_id FROM step_trajectories WHERE run_id = ?"
            " ORDER BY step DESC, trajectory_id DESC LIMIT 1",
            [run_id],
        ).fetchone()
        if row is None:
            raise ValueError(f"Run {run_id} has trained no trajectory yet; give an id.")
        trajectory_id = str(row[0])
    found = connection.execute(
        "SELECT trajectory_id, split, status, finish_reason, reward, weight_version_min,"
        " weight_version_max, task_id, messages"
        " FROM trajectories WHERE run_id = ? AND trajectory_id = ?",
        [run_id, trajectory_id],
    )
    names = [column[0] for column in found.description or []]
    row = found.fetchone()
    if row is None:
        raise ValueError(
            f"Run {run_id} has no recorded trajectory {trajectory_id}; "
            '`rollhouse sql "SELECT trajectory_id FROM trajectories"` lists them.'
        )
    first = lake.ledger(run_id).last("version_published", version=0)
    # An imported run has no tokenizer; its tokens are shown by their ids.
    renderer = None
    if first is not None:
        from tasks.weights.versions import version_folder

        renderer = Renderer(version_folder(_run_store(lake, run_id), first.details["uri"]))
    tokens = connection.execute(
        "SELECT t.position, t.token_id, t.kind, t.weight_version AS version,"
        " t.rollout_logprob AS log_mu, s.old_logprob AS log_pi, s.delta AS log_w"
        " FROM tokens_all t LEFT JOIN token_scores s"
        " USING (run_id, trajectory_id, sequence_index, position)"
        " WHERE t.run_id = ? AND t.trajectory_id = ?"
        " ORDER BY t.sequence_index, t.position",
        [run_id, trajectory_id],
    ).fetchall()
    # An import may know a rollout as text alone.
    if not tokens and first is not None:
        _explain_missing_tokens(lake, run_id, trajectory_id)
    return dict(zip(names, row, strict=True)) | {
        "tokens": [
            {
                "position": position,
                "token_id": token_id,
                "text": None if renderer is None else renderer.token_text(token_id),
                "kind": kind,
                "version": version,
                "log_mu": _rounded(log_mu),
                "log_pi": _rounded(log_pi),
                "w": None if log_w is None else _rounded(math.exp(log_w)),
            }
            for position, token_id, kind, version, log_mu, log_pi, log_w in tokens
        ]
    }


def _explain_missing_tokens(lake: Lake, run_id: str, trajectory_id: str) -> NoReturn:
    """Raises `ValueError`: the tokens expired by policy, or the lake is not whole."""
    cycle = lake.read(
        "trajectories",
        run_id=run_id,
        columns=["cycle"],
        where="trajectory_id = ?",
        params=[trajectory_id],
    )
    for record in lake.read(
        "maintenance",
        run_id=run_id,
        where="action = 'expire' AND table_name = 'segments' AND cycle = ?",
        params=[cycle.column(0)[0].as_py()],
    ).to_pylist():
        raise ValueError(
            f"The tokens of trajectory {trajectory_id} expired on {record['recorded_at']:%Y-%m-%d} "
            f"({record['policy']}); `rollhouse sql` still has its row in trajectories."
        )
    raise ValueError(
        f"The lake has no tokens of trajectory {trajectory_id}; restore it from a backup."
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
