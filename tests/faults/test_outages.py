"""The place of a lake fails in the middle of a cycle: a full disk, a read-only one, S3 gone for a
while or for good. Whole runs; each ends as one that was never disturbed."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.s3_server import BUCKET, S3Server
from tests.tiny_run import TinyRun, count

pytestmark = pytest.mark.slow

ONE_CYCLE = ("--no-prefect", "--until-cycle", "1")


def reached(kind: str, number: int):
    return lambda entries: count(entries, kind) >= number


def assert_went_on_like(tiny: TinyRun, finished_run) -> None:
    """Ended a cycle as the undisturbed run did."""
    undisturbed, _ = finished_run
    so_far = tiny.canonical_ledger()
    assert so_far == undisturbed.canonical_ledger()[: len(so_far)]
    assert so_far[-1][0] == "cycle_closed"
    assert tiny.trained_twice() == [] and tiny.broken_invariants() == []


def mount(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["mount", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 64 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", place)
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount: {mounted.stderr}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> Callable[[], None]:
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    return filler.unlink


def make_read_only(place: Path) -> Callable[[], None]:
    # Refused while a file is open for writing, which in a lake is never long.
    until = time.monotonic() + 30
    while mount("-o", "remount,ro", place).returncode != 0:
        assert time.monotonic() < until, "the disk was never idle"
    return lambda: mount("-o", "remount,rw", place).check_returncode()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(fill, "No space left on device"), (make_read_only, "Read-only file system")],
)
def test_a_disk_that_cannot_be_written_in_mid_cycle(
    tiny_run, finished_run, small_disk: Path, spoil, words: str
):
    lake = f"run.lake={small_disk}/lake"
    tiny = tiny_run(lake)
    with tiny.start(*ONE_CYCLE) as process:
        tiny.wait_for(reached("batch_trained", 1))
        mend = spoil(small_disk)
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == 1
    assert words in stderr and "run the same command again" in stderr.lower()
    assert "Traceback" not in stderr
    mend()
    result = tiny.run(*ONE_CYCLE)
    assert result.returncode == 0, result.stderr
    assert_went_on_like(tiny, finished_run)


def test_s3_gone_for_twenty_seconds_and_then_for_good(tiny_run, finished_run, own_server: S3Server):
    tiny = tiny_run(place=f"s3://{BUCKET}/outages")
    with tiny.start(*ONE_CYCLE) as process:
        tiny.wait_for(reached("batch_trained", 1))
        own_server.stop()
        time.sleep(20)
        assert process.poll() is None
        own_server.start()
        tiny.wait_for(reached("batch_trained", 2))
        own_server.stop()
        _, stderr = process.communicate(timeout=400)
    assert process.returncode == 1
    assert "s3://" in stderr and "run the same command again" in stderr.lower()
    assert "Traceback" not in stderr and os.environ["AWS_SECRET_ACCESS_KEY"] not in stderr
    own_server.start()
    result = tiny.run(*ONE_CYCLE)
    assert result.returncode == 0, result.stderr
    assert_went_on_like(tiny, finished_run)
