"""What the commands share: their common options, and how they print."""

import json
import math
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

LakeOption = Annotated[
    str, typer.Option("--lake", envvar="ROLLHOUSE_LAKE", help="Directory of the lake.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
RunOption = Annotated[
    str | None, typer.Option("--run", help="Run id; needed where the lake has several.")
]


def emit(document: Any) -> None:
    typer.echo(json.dumps(_without_infinities(document), default=str, allow_nan=False))


def _without_infinities(value: Any) -> Any:
    """JSON has no NaN and no infinity; they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(item) for item in value]
    return value


def print_rows(names: list[str], rows: list[tuple[Any, ...]], title: str | None = None) -> None:
    table = Table(*names, title=title, title_justify="left")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row))
    # A pipe has no width: rows stay on one line each.
    console = Console(width=None if sys.stdout.isatty() else 10_000)
    console.print(table, markup=False)


def pick_run(run_ids: list[str], run_id: str | None, lake: str) -> str:
    if run_id is not None and run_id not in run_ids:
        raise ValueError(f"The lake at {lake} has no run {run_id}; it has {', '.join(run_ids)}.")
    if run_id is None and len(run_ids) != 1:
        raise ValueError(
            f"The lake at {lake} has {len(run_ids)} runs ({', '.join(run_ids)}); pick one with "
            "--run."
        )
    return run_id or run_ids[0]
