"""What the lake costs, against what one would write without it: one line a target.

    make bench-lake                                  # all
    python -m tests.benchmarks.lake append commits   # some

Baseline and subject take turns in one process. A ratio is the median over the pairs, with the
bootstrap's 95 % interval of it (the range where there are fewer than six). A miss is printed, not
an error.
"""

import sys
import tempfile
from pathlib import Path

from tests.benchmarks.lake import append, commits, gate, views

PARTS = {"append": append, "commits": commits, "gate": gate, "views": views}


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        sys.exit(f"There is no part {', '.join(unknown)}; there are {', '.join(PARTS)}.")
    for name in names or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            for line in PARTS[name].lines(Path(folder)):
                print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
