"""Whole runs whose versions are patches, on a disk and in a bucket."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tasks.publish import version_dir
from tasks.query import connect
from tasks.weights.hashing import root_hash
from tests.tiny_run import REPOSITORY, ROLLHOUSE, RUN_ID, TinyRun

pytestmark = pytest.mark.slow

PATCHES = "publication.anchor_every=3"


def weights(tiny: TinyRun, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ROLLHOUSE, "weights", *arguments, "--lake", tiny.config.run.lake],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("place", ["disk", "s3"])
def test_a_run_on_patches_ends_as_one_on_anchors(
    finished_run, tiny_run, place: str, request: pytest.FixtureRequest, tmp_path: Path
):
    tiny = tiny_run(PATCHES, place=request.getfixturevalue("s3_uri") if place == "s3" else None)
    first = tiny.run("--no-prefect", "--until-cycle", "1")
    assert first.returncode == 0, first.stderr
    # What a machine keeps is made again: the next cycle may run on another one.
    shutil.rmtree(tiny.root / "cache")
    second = tiny.run("--no-prefect")
    assert second.returncode == 0, second.stderr
    on_anchors, _ = finished_run
    assert tiny.canonical_ledger() == on_anchors.canonical_ledger()
    assert tiny.broken_invariants() == []
    kinds = connect(tiny.lake).sql("SELECT version, kind FROM publications ORDER BY 1").fetchall()
    assert kinds == [(v, "anchor" if v in (0, 3) else "patch") for v in range(5)]
    for entry in tiny.entries:
        if entry.kind == "version_published":
            folder = version_dir(tiny.config, entry.details["uri"])
            assert root_hash(load_file(folder / "model.safetensors")) == entry.root_hash

    verified = weights(tiny, "verify", "--json")
    assert verified.returncode == 0, verified.stderr
    rows = json.loads(verified.stdout)
    assert [(row["version"], row["patches"], row["ok"]) for row in rows] == [
        (0, 0, True),
        (1, 1, True),
        (2, 2, True),
        (3, 0, True),
        (4, 1, True),
    ]
    exported = weights(tiny, "export", "2", "--to", str(tmp_path / "two"))
    assert exported.returncode == 0, exported.stderr
    published = {e.version: e.root_hash for e in tiny.entries if e.kind == "version_published"}
    assert root_hash(load_file(tmp_path / "two" / "model.safetensors")) == published[2]
    refused = weights(tiny, "verify", "9")
    assert refused.returncode == 2
    assert f"Run {RUN_ID} has not published version 9; it has 0 to 4." in refused.stderr


def test_a_damaged_patch_is_found_by_every_reader(tiny_run, tmp_path: Path):
    tiny = tiny_run(PATCHES)
    assert tiny.run("--no-prefect", "--until-cycle", "1").returncode == 0
    (patch,) = (tiny.root / "store").glob("*/weights/v00000001-*/model.patch")
    data = bytearray(patch.read_bytes())
    data[len(data) // 2] ^= 1
    patch.write_bytes(data)
    verified = weights(tiny, "verify", "--json")
    assert verified.returncode == 1 and "Traceback" not in verified.stderr
    assert [row["ok"] for row in json.loads(verified.stdout)] == [True, False, False]
    fault = "model.patch is not the file that was published"
    exported = weights(tiny, "export", "2", "--to", str(tmp_path / "two"))
    assert exported.returncode == 2 and fault in exported.stderr
    assert not (tmp_path / "two").exists()
    (broken,) = tiny.broken_invariants()
    assert broken.invariant == "weights" and len(broken.faults) == 2 and fault in broken.faults[0]
