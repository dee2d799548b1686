"""`rollhouse data-docs`: the pages of a run, built again from its lake."""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli_output import JsonOption, LakeOption, RunOption, emit, pick_run


def data_docs(
    lake: LakeOption,
    to: Annotated[
        Path | None, typer.Option(help="Folder; default: data_docs in the run's store.")
    ] = None,
    run_id: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build the pages that show what the gates found, from the lake alone."""
    from flows.inspection import run_config
    from tasks.data_docs.pages import write_data_docs
    from tasks.lake.lake import Lake
    from tasks.weights.store import open_store

    opened = Lake.open(lake)
    picked = pick_run(opened.run_ids(), run_id, lake)
    folder = (
        open_store(run_config(opened, picked)).folder / "data_docs" if to is None else to.absolute()
    )
    index = write_data_docs(opened, picked, folder)
    if as_json:
        emit({"run_id": picked, "data_docs": str(index)})
    else:
        typer.echo(f"The data docs of run {picked} are at {index}.")


def register(app: typer.Typer) -> None:
    app.command("data-docs")(data_docs)
