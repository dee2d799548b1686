"""`rollhouse replay`: train what is recorded again, and say whether the weights come out."""

from typing import Annotated, Any

import typer

from flows.cli_output import JsonOption, LakeOption, RunOption, emit, pick_run


def replay(
    lake: LakeOption,
    step: Annotated[
        int | None, typer.Option(help="Optimizer step whose batch is replayed; default: all.")
    ] = None,
    run_id: RunOption = None,
    store: Annotated[
        str | None, typer.Option(help="Where the run's store is now; default: the run's own.")
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="On a GPU: largest distance from the recorded weights that passes, as a share of "
            "the batch's update.",
        ),
    ] = 0.1,
    as_json: JsonOption = False,
) -> None:
    """Train recorded batches again, writing nothing, and compare every weight and score."""
    from tasks.lake.lake import Lake
    from tasks.replay import replay as replayed

    opened = Lake.open(lake)
    name = pick_run(opened.run_ids(), run_id, lake)
    rows = []
    for row in replayed(opened, name, step=step, store_uri=store, tolerance=tolerance):
        rows.append(row)
        if not as_json:
            typer.echo(_line(row))
    if as_json:
        emit(rows)
    else:
        typer.echo(_summary(rows, tolerance))
    if not all(row["ok"] for row in rows):
        raise typer.Exit(1)


def _line(row: dict[str, Any]) -> str:
    line = f"step {row['step']} (batch {row['batch']}, minibatch {row['minibatch']}"
    if "origin" in row:
        line += f", from {row['origin']}"
    line += f"): {row['verdict']}"
    return f"{line}: {row['found']}" if row["found"] else line


def _summary(rows: list[dict[str, Any]], tolerance: float) -> str:
    counts = dict.fromkeys(("equal", "differs", "near", "far", "not replayed"), 0)
    for row in rows:
        counts[row["verdict"]] += 1
    parts = [f"{count} {verdict}" for verdict, count in counts.items() if count]
    line = f"{len(rows)} steps: {', '.join(parts)}."
    if counts["near"] or counts["far"]:
        line += (
            f" Near is within {tolerance:g} of the batch's update; kernels of a GPU are not "
            "deterministic, so equality is not claimed."
        )
    for place in sorted({row["elsewhere"] for row in rows if row.get("elsewhere")}):
        line += f" Bits may differ, since this was {place}."
    return line


def register(app: typer.Typer) -> None:
    app.command()(replay)
