"""Dependencies between rooms point one way, and what must be light is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

MAY_IMPORT = {
    "schemas": set(),
    "tasks": {"schemas"},
    "trainers": {"schemas", "tasks.lake", "tasks.weights", "tasks.durable"},
    "flows": {"schemas", "tasks"},
}


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name for name in found if name.split(".")[0] in MAY_IMPORT}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(room: str):
    allowed = {room, *MAY_IMPORT[room]}
    for file in Path(room).rglob("*.py"):
        for name in imports(file):
            assert any(name == a or name.startswith(f"{a}.") for a in allowed), f"{file}: {name}"


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_the_lake_and_the_weights_are_free_of_prefect():
    loaded = modules_after("import tasks.lake.lake, tasks.lake.batches, tasks.weights.anchors")
    assert "deltalake" in loaded and "prefect" not in loaded
    assert "great_expectations" not in loaded and "transformers" not in loaded


def test_schemas_load_no_engine():
    loaded = modules_after("import schemas.config, schemas.tables, schemas.expectations")
    assert not loaded & {"torch", "duckdb", "deltalake", "prefect", "great_expectations"}


def test_inspecting_loads_no_model_code():
    loaded = modules_after("import flows.inspection")
    assert not loaded & {"torch", "transformers", "prefect", "great_expectations"}


def test_the_command_line_loads_nothing_heavy():
    loaded = modules_after("import flows.cli")
    assert not loaded & {"torch", "duckdb", "pyarrow", "prefect", "great_expectations"}
