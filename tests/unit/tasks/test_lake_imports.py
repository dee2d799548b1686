import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

CONTROL_PLANE = {"prefect", "great_expectations", "transformers"}
DATA_PLANE = CONTROL_PLANE | {"deltalake", "duckdb", "pyarrow"}


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("tasks.lake", CONTROL_PLANE | {"torch"}),
        ("tasks.weights.hashing", DATA_PLANE),
        ("tasks.weights.anchors", DATA_PLANE),
        ("tasks.weights.patch", DATA_PLANE),
        ("tasks.weights.importing", {"prefect", "great_expectations", "deltalake"}),
    ],
)
def test_rooms_stay_light(module: str, forbidden: set[str]):
    script = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    assert module in loaded
    assert forbidden.isdisjoint(loaded)
