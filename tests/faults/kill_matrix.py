"""Kills real runs at every point of `kill_points`, seed by seed, and prints what became of each.

    python -m tests.faults.kill_matrix [--seeds N] [--points TEXT]

Every seed has another run seed and dies at another occurrence of each point. Ends with 1 if any
resumed run differs from the uninterrupted one of its seed, or breaks an invariant.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.kill_points import AHEAD as POINTS_AHEAD
from tests.faults.kill_points import BETWEEN_ANCHORS, IN_A_BUCKET, ON_DISK, Point
from tests.faults.kill_runs import AHEAD, PATCHED, KillMatrix, Outcome, can_trace
from tests.s3_server import BUCKET, S3Server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--points", default="", help="only those whose name contains this")
    arguments = parser.parse_args()
    if not can_trace():
        sys.exit("Install strace, and allow it to attach to processes, to kill inside delta-rs.")

    def wanted(points: tuple[Point, ...]) -> list[Point]:
        return [point for point in points if arguments.points in point.name]

    outcomes: list[Outcome] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        server = S3Server(root / "s3")
        server.start()
        try:
            server.create_bucket(BUCKET)
            os.environ.update(server.environment)
            for seed in range(arguments.seeds):
                for name, points, bucket, settings in (
                    ("disk", ON_DISK, None, ()),
                    ("ahead", POINTS_AHEAD, None, AHEAD),
                    ("patches", BETWEEN_ANCHORS, None, PATCHED),
                    ("bucket", IN_A_BUCKET, f"s3://{BUCKET}/matrix", ()),
                ):
                    if not wanted(points):
                        continue
                    print(f"seed {seed}, {name}:", flush=True)
                    place = root / f"{name}-{seed}"
                    place.mkdir()
                    matrix = KillMatrix(
                        place, root / "policies", seed, wanted(points), bucket, settings
                    )
                    outcomes += matrix.run(lambda line: print(line, flush=True))
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


if __name__ == "__main__":
    sys.exit(main())
