"""`rollhouse export` and `rollhouse import`: rollouts to and from other frameworks."""

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flows.cli_output import JsonOption, LakeOption, RunOption, emit, pick_run, print_rows


class Format(StrEnum):
    """How an export is written."""

    jsonl = "jsonl"
    parquet = "parquet"
    hf = "hf"


class Origin(StrEnum):
    """Whose files are imported."""

    verl = "verl"
    trl = "trl"
    prime_rl = "prime-rl"


class Split(StrEnum):
    """What imported rollouts were sampled for."""

    train = "train"
    heldout = "heldout"


def export(
    lake: LakeOption,
    to: Annotated[Path, typer.Option(help="New file, or new folder for hf.")],
    format: Annotated[Format, typer.Option(help="hf is a Hugging Face dataset folder.")],
    run_id: RunOption = None,
    batch: Annotated[int | None, typer.Option(help="Batch number: one row a sequence.")] = None,
    query: Annotated[str | None, typer.Option(help="One SELECT over tables and views.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a batch or the result of a read-only query for other tools."""
    from tasks.interchange.exported import batch_rows, query_rows
    from tasks.interchange.targets import write_export
    from tasks.lake.lake import Lake

    if (batch is None) == (query is None):
        raise ValueError("Give either --batch N or --query SQL.")
    opened = Lake.open(lake)
    if query is not None:
        rows = query_rows(opened, query)
    else:
        assert batch is not None
        rows = batch_rows(opened, pick_run(opened.run_ids(), run_id, lake), batch)
    written = write_export(rows, format.value, to)
    if as_json:
        emit(written)
    else:
        typer.echo(f"{written['rows']} rows are at {written['path']} ({written['bytes']} bytes).")


def import_(
    path: Annotated[Path, typer.Argument(help="File, or folder of files, that it wrote.")],
    lake: LakeOption,
    run_id: Annotated[str, typer.Option("--run", help="Run to import into, new or of the same.")],
    origin: Annotated[Origin, typer.Option("--from", help="Framework that wrote the files.")],
    split: Annotated[
        Split, typer.Option(help="What the rollouts were for, where files do not say.")
    ] = Split.train,
    rewards: Annotated[
        list[str] | None,
        typer.Option(
            "--reward",
            metavar="NAME=WEIGHT",
            help="A reward function's column in TRL's files; the reward is their weighted sum.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Bring in rollouts that verl, TRL or prime-rl wrote, as a run that is never trained."""
    from tasks.interchange.imported import import_rollouts
    from tasks.interchange.source import Options

    options = Options(split.value, dict(_reward(text) for text in rewards or []))
    summary = import_rollouts(lake, path, run_id=run_id, origin=origin.value, options=options)
    if as_json:
        emit(summary)
        return
    typer.echo(
        f"{summary['trajectories']} rollouts in {summary['groups']} groups with "
        f"{summary['tokens']} tokens are in run {run_id}."
    )
    for name in ("nonfinite_as_null", "quarantined"):
        if summary[name]:
            typer.echo(f"{name}: {summary[name]}")
    if summary["kept_in_origin_details"]:
        typer.echo(f"kept in origin_details: {', '.join(summary['kept_in_origin_details'])}")
    for rows in (summary["files_left_out"], summary["not_held"]):
        if rows:
            print_rows(list(rows[0]), [tuple(row.values()) for row in rows])


def _reward(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not name or not math.isfinite(value):
        raise ValueError(f"--reward {text}: give NAME=WEIGHT, such as accuracy_reward=1.0.")
    return name, value


def register(app: typer.Typer) -> None:
    app.command()(export)
    app.command("import")(import_)
