"""Import what another framework sampled, as a run of its own that is never trained.

Files are read twice: once to find faults, so that a bad file changes nothing at all, and once to
write. One ledger row names all writes of an import, so a crash before it leaves nothing visible.
The row also holds a hash of each file, by which the same content is recognised again; of a JSON
lines file that has grown since, only the end is new.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from schemas.expectations import imported as expectations
from tasks.interchange import prime_rl, trl, verl
from tasks.interchange.source import Options, Source, Span
from tasks.interchange.writing import Import
from tasks.lake.batches import trajectories_hash
from tasks.lake.lake import Lake
from tasks.lake.lease import take_lease
from tasks.lake.ledger import Ledger

SOURCES: dict[str, Source] = {"verl": verl.SOURCE, "trl": trl.SOURCE, "prime-rl": prime_rl.SOURCE}
READ_BYTES = 1 << 20
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def imported_from(ledger: Ledger) -> str | None:
    """The framework that a run was imported from; None for a run of our own or without rows."""
    if not ledger.entries:
        return None
    return ledger.entries[0].details.get("imported", {}).get("from")


@dataclass(frozen=True)
class _File:
    """A file to import: `span` is what is new of its `bytes` bytes, whose hash is `blake3`."""

    path: Path
    span: Span
    bytes: int
    blake3: str


def _known(ledger: Ledger) -> dict[tuple[int, str], str]:
    """(bytes, hash) of each file the run holds, and its name."""
    return {
        (file["bytes"], file["blake3"]): file["file"]
        for entry in ledger.entries
        for file in entry.details.get("files", ())
        if entry.kind == "rollouts_recorded"
    }


def _look_at(path: Path, grows: bool, known: Iterable[tuple[int, str]]) -> _File:
    """Hashes a file, and finds how much of its beginning is known already."""
    size = path.stat().st_size
    ends = sorted({length for length, _ in known if length < size}) if grows else []
    hasher, start, first_line, lines, position = blake3(), 0, 1, 0, 0
    with open(path, "rb") as file:
        for end in (*ends, size):
            while position < end and (chunk := file.read(min(READ_BYTES, end - position))):
                hasher.update(chunk)
                position += len(chunk)
                lines += chunk.count(b"\n")
            if end < size and (end, hasher.hexdigest()) in known:
                start, first_line = end, lines + 1
    return _File(path, Span(start, position, first_line), position, hasher.hexdigest())


def import_rollouts(
    lake_uri: str, path: Path, *, run_id: str, origin: str, options: Options
) -> dict[str, Any]:
    """Imports a file or folder into a run; a summary for people and machines.

    Raises:
        ValueError: path, run or a record of a file will not do; nothing was imported.
        LeaseHeld: another import into the run is at work.
    """
    source = SOURCES[origin]
    if not RUN_ID.fullmatch(run_id):
        raise ValueError(
            f"--run {run_id!r}: use letters, digits, dots, dashes and underscores, 64 at most."
        )
    if options.rewards and origin != "trl":
        raise ValueError(f"--reward names columns of TRL's files; those of {origin} have a reward.")
    paths, left_out = _files(path, source, origin)
    lake = Lake.create(lake_uri)
    ledger = lake.ledger(run_id)
    _check_run(ledger, origin)
    files = list(_new_files(paths, source, ledger, left_out))
    for file in files:
        for _ in source.read(file.path, options, replace(file.span)):
            pass
    work = None
    if files:
        work = _open_import(lake, ledger, origin, path)
        # What another import has added since the first look is not added again.
        files = list(_new_files([file.path for file in files], source, ledger, left_out))
        _write_files(work, source, files, options)
    return _summary(run_id, origin, lake, work, files, left_out)


def _files(path: Path, source: Source, origin: str) -> tuple[list[Path], list[tuple[Path, str]]]:
    if path.is_file():
        return [path], []
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder.")
    paths, left_out = source.find(path)
    if not paths and not left_out:
        raise ValueError(
            f"{path} holds no rollouts as {origin} writes them; docs/interchange.md lists where "
            "it writes which files."
        )
    return paths, left_out


def _check_run(ledger: Ledger, origin: str) -> None:
    if not ledger.entries:
        return
    holds = imported_from(ledger)
    if holds != origin:
        whose = "its own rollouts" if holds is None else f"rollouts imported from {holds}"
        raise ValueError(
            f"Run {ledger.run_id} holds {whose}; give those of {origin} another --run."
        )


def _new_files(
    paths: list[Path], source: Source, ledger: Ledger, left_out: list[tuple[Path, str]]
) -> Iterator[_File]:
    known = _known(ledger)
    for path in paths:
        file = _look_at(path, source.grows, known)
        if (file.bytes, file.blake3) in known:
            name = known[file.bytes, file.blake3]
            left_out.append((path, f"its content was imported before, as {name}"))
        else:
            known[file.bytes, file.blake3] = path.name
            yield file


def _open_import(lake: Lake, ledger: Ledger, origin: str, path: Path) -> Import:
    if not ledger.entries:
        ledger.append(
            "run_created",
            lease=0,
            cycle=0,
            details={"imported": {"from": origin}, "source": str(path)},
        )
    lease = take_lease(ledger)
    taken = lake.read("trajectories", run_id=ledger.run_id, columns=["group_id"])
    groups = taken.column("group_id").to_pylist()
    return Import(lake, ledger, origin, lease, first_group=max(groups, default=-1) + 1)


def _write_files(work: Import, source: Source, files: list[_File], options: Options) -> None:
    """Writes all files and commits them in one ledger row."""
    recorded = []
    for file in files:
        count = work.write(file.path, source.read(file.path, options, file.span))
        work.counts["nonfinite_as_null"] += file.span.num_nonfinite
        recorded.append(
            {
                "file": file.path.name,
                "bytes": file.bytes,
                "blake3": file.blake3,
                "num_trajectories": count,
            }
        )
    if work.trajectory_ids:
        work.ledger.append(
            "rollouts_recorded",
            lease=work.lease,
            write_ids=work.write_ids,
            num_trajectories=len(work.trajectory_ids),
            trajectories_hash=trajectories_hash(work.trajectory_ids),
            details={"files": recorded, "quarantined": work.counts["quarantined"]},
        )


def _summary(
    run_id: str,
    origin: str,
    lake: Lake,
    work: Import | None,
    files: list[_File],
    left_out: list[tuple[Path, str]],
) -> dict[str, Any]:
    counts: Counter[str] = Counter() if work is None else work.counts
    texts = {rule.id: (rule.severity, rule.description) for rule in expectations.RULES}
    return {
        "run_id": run_id,
        "from": origin,
        "lake": lake.uri,
        "files": [str(file.path) for file in files],
        "files_left_out": [{"file": str(file), "why": why} for file, why in left_out],
        "trajectories": 0 if work is None else len(work.trajectory_ids),
        "groups": 0 if work is None else len(work.groups),
        "tokens": counts["tokens"],
        "action_tokens": counts["action_tokens"],
        "nonfinite_as_null": counts["nonfinite_as_null"],
        "quarantined": counts["quarantined"],
        "not_held": [
            {
                "rule": rule,
                "severity": texts[rule][0],
                "rollouts": num,
                "holds_when": texts[rule][1],
            }
            for rule, num in ({} if work is None else work.broken).items()
            if rule in texts
        ],
        "kept_in_origin_details": sorted(set() if work is None else work.kept),
    }
