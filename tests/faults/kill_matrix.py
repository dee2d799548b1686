"""Kills real runs at every point of `kill_points`, seed by seed, and prints what became of each.

    python -m tests.faults.kill_matrix [--seeds N] [--points TEXT]

Every seed has another run seed and dies at another occurrence of each point. Ends with 1 if any
resumed run differs from the uninterrupted one of its seed, or breaks an invariant.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.faults.kill_points import AHEAD as POINTS_AHEAD
from tests.faults.kill_points import BETWEEN_ANCHORS, IN_A_BUCKET, ON_DISK, Point
from tests.faults.kill_runs import AHEAD, PATCHED, KillMatrix, Outcome, can_trace
from tests.s3_server import BUCKET, S3Server

WORKERS = 2
SUITES: dict[str, tuple[tuple[Point, ...], str | None, tuple[str, ...]]] = {
    "disk": (ON_DISK, None, ()),
    "bucket": (IN_A_BUCKET, f"s3://{BUCKET}/matrix", ()),
    "ahead": (POINTS_AHEAD, None, AHEAD),
    "patches": (BETWEEN_ANCHORS, None, PATCHED),
}
"""Name to points, address in the bucket, and `--set` overrides."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--points", default="", help="only those whose name contains this")
    arguments = parser.parse_args()
    if not can_trace():
        sys.exit("Install strace, and allow it to attach to processes, to kill inside delta-rs.")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        server = S3Server(root / "s3")
        server.start()
        try:
            server.create_bucket(BUCKET)
            os.environ.update(server.environment)
            outcomes = list(_outcomes(root, arguments.seeds, arguments.points))
        finally:
            server.stop()
    bad = [outcome for outcome in outcomes if outcome.problems]
    num_points = len({outcome.point for outcome in outcomes})
    print(
        f"{num_points} points x {arguments.seeds} seeds: {len(outcomes)} deaths, all equal: "
        f"{'no' if bad else 'yes'}, {time.monotonic() - started:.0f} s"
    )
    for outcome in bad:
        print(outcome.row())
    return 1 if bad else 0


def _outcomes(root: Path, num_seeds: int, wanted: str) -> Iterator[Outcome]:
    # A run keeps one core busy, and a suite takes its runs one after another.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        running = [
            pool.submit(_run_suite, root, name, seed, wanted)
            for seed in range(num_seeds)
            for name in SUITES
        ]
        for suite in running:
            yield from suite.result()


def _run_suite(root: Path, name: str, seed: int, wanted: str) -> list[Outcome]:
    all_points, bucket, settings = SUITES[name]
    points = [point for point in all_points if wanted in point.name]
    if not points:
        return []
    folder = root / f"{name}-{seed}"
    folder.mkdir()
    matrix = KillMatrix(folder, root / "policies", seed, points, bucket, settings)
    return matrix.run(lambda line: print(f"seed {seed} {name:8}{line}", flush=True))


if __name__ == "__main__":
    sys.exit(main())
