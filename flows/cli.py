"""The `rollhouse` command.

Everything heavy is imported inside the command that needs it, so that `--help` answers at once.
Exit code 2 is bad input, 1 a run that failed or was refused; either comes with one sentence.
"""

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from flows import (
    data_docs_command,
    decision_commands,
    interchange_commands,
    maintain_command,
    replay_command,
)
from flows.cli_output import JsonOption, LakeOption, RunOption, emit, pick_run, print_rows

app = typer.Typer(
    help="Rollouts, token by token, in a lake that online RL can be trained and audited from.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
weights = typer.Typer(help="Published weight versions.", no_args_is_help=True)


@app.command()
def run(
    run_file: Annotated[Path, typer.Argument(help="Run TOML, such as infra/runs/demo.toml.")],
    until_cycle: Annotated[
        int | None, typer.Option(help="Absolute number of cycles to reach; default: the TOML's.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a TOML key.")
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the lease from a controller that holds it.")
    ] = False,
    prefect: Annotated[
        bool, typer.Option(help="Run each cycle as a Prefect flow run (embedded API).")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Open or resume the run and execute its cycles; after success it does nothing."""
    from flows.run_file import load_run_file

    config = load_run_file(run_file, set_ or [])
    # Before torch is loaded: its OpenMP barriers would spin against the trainer's.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from contextlib import nullcontext

    from flows.display import RunDisplay, print_summary
    from flows.prefect_cycle import prefect_api, run_as_flow
    from flows.run import execute_run_sync, run_plain
    from flows.summary import summarise

    console = Console(stderr=as_json)
    total = config.run.num_cycles * config.run.batches_per_cycle
    with prefect_api() if prefect else nullcontext(), RunDisplay(console, total) as display:
        finished = execute_run_sync(
            config,
            str(run_file),
            until_cycle=until_cycle,
            take_over=take_over,
            run_cycle=run_as_flow if prefect else run_plain,
            report=display,
        )
    summary = summarise(finished)
    if as_json:
        emit(summary)
    else:
        print_summary(console, summary)


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="One SELECT over tables and views.")],
    lake: LakeOption,
    as_json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV on standard output.")] = False,
    as_of: Annotated[
        int | None, typer.Option("--as-of", metavar="SEQ", help="What counted at a ledger row.")
    ] = None,
    run_id: RunOption = None,
) -> None:
    """Answer a read-only query with DuckDB."""
    from flows.inspection import connection_for
    from tasks.lake.lake import Lake
    from tasks.query import run_query

    opened = Lake.open(lake)
    run_id = pick_run(opened.run_ids(), run_id, lake) if as_of is not None else run_id
    names, rows = run_query(connection_for(opened, run_id, as_of), query)
    if as_json:
        emit([dict(zip(names, row, strict=True)) for row in rows])
    elif as_csv:
        import csv

        writer = csv.writer(sys.stdout)
        writer.writerow(names)
        writer.writerows(rows)
    else:
        print_rows(names, rows)


@app.command()
def views(as_json: JsonOption = False) -> None:
    """List tables and views with what each holds."""
    from schemas.tables import TABLES
    from schemas.views import view_sources, view_title

    listed = [(name, "table", table.description) for name, table in TABLES.items()]
    listed += [(name, "view", view_title(text)) for name, text in view_sources().items()]
    if as_json:
        emit([dict(zip(("name", "kind", "description"), row, strict=True)) for row in listed])
    else:
        print_rows(["name", "kind", "description"], listed)


@app.command()
def describe(
    table: Annotated[str, typer.Argument(help="Table or view.")],
    as_json: JsonOption = False,
    history: Annotated[
        bool, typer.Option("--history", help="The table's Delta versions instead; needs --lake.")
    ] = False,
    lake: Annotated[
        str | None, typer.Option("--lake", envvar="ROLLHOUSE_LAKE", help="Directory of the lake.")
    ] = None,
) -> None:
    """Show a table's or view's columns with their meaning."""
    from tasks.query import describe_columns

    if history:
        from flows.inspection import history_of

        rows = history_of(lake, table)
        if as_json:
            emit(rows)
        else:
            print_rows(list(rows[0]), [tuple(row.values()) for row in rows])
        return
    columns = list(describe_columns(table))
    if as_json:
        emit([dict(zip(("column", "type", "description"), row, strict=True)) for row in columns])
    else:
        print_rows(["column", "type", "description"], columns)


@app.command()
def trajectory(
    lake: LakeOption,
    trajectory_id: Annotated[
        str | None, typer.Argument(help="Trajectory id; default: the last one trained.")
    ] = None,
    run_id: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one trajectory token by token: text, kind, version, log mu, log pi, w."""
    from flows.inspection import trajectory_tokens
    from tasks.lake.lake import Lake

    opened = Lake.open(lake)
    found = trajectory_tokens(opened, pick_run(opened.run_ids(), run_id, lake), trajectory_id)
    if as_json:
        emit(found)
        return
    # Quoted, so that a space is seen and a newline keeps its line.
    tokens = [
        token if token["text"] is None else token | {"text": repr(token["text"])}
        for token in found.pop("tokens")
    ]
    print_rows(list(found), [tuple(found.values())])
    if tokens:
        print_rows(list(tokens[0]), [tuple(token.values()) for token in tokens])


@app.command()
def status(lake: LakeOption, as_json: JsonOption = False) -> None:
    """Show each run: cycles, batches, versions, engines, and what waits."""
    from flows.inspection import run_status
    from tasks.lake.lake import Lake

    opened = Lake.open(lake)
    rows = [run_status(opened, name) for name in opened.run_ids()]
    if as_json:
        emit(rows)
    elif rows:
        print_rows(list(rows[0]), [tuple(row.values()) for row in rows])
    else:
        typer.echo("The lake has no run yet; `rollhouse run RUN.toml` makes one.")


@weights.command("list")
def weights_list(lake: LakeOption, run_id: RunOption = None, as_json: JsonOption = False) -> None:
    """List published versions."""
    from flows.inspection import publications
    from tasks.lake.lake import Lake

    opened = Lake.open(lake)
    rows = publications(opened, pick_run(opened.run_ids(), run_id, lake))
    if as_json:
        emit(rows)
    else:
        print_rows(list(rows[0]) if rows else [], [tuple(row.values()) for row in rows])


@weights.command("verify")
def weights_verify(
    lake: LakeOption,
    version: Annotated[int | None, typer.Argument(help="Weight version; default: all.")] = None,
    run_id: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Rebuild versions from the store and compare every tensor's hash with the ledger."""
    from flows.inspection import verify_versions
    from tasks.lake.lake import Lake

    opened = Lake.open(lake)
    rows = list(verify_versions(opened, pick_run(opened.run_ids(), run_id, lake), version))
    if as_json:
        emit(rows)
    else:
        print_rows(list(rows[0]), [tuple(row.values()) for row in rows])
    if not all(row["ok"] for row in rows):
        raise typer.Exit(1)


@weights.command("export")
def weights_export(
    version: Annotated[int, typer.Argument(help="Weight version.")],
    to: Annotated[Path, typer.Option(help="New or empty directory.")],
    lake: LakeOption,
    run_id: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a version as a Hugging Face folder, every value verified."""
    from flows.inspection import export_version
    from tasks.lake.lake import Lake

    opened = Lake.open(lake)
    document = export_version(opened, pick_run(opened.run_ids(), run_id, lake), version, to)
    if as_json:
        emit(document)
    else:
        typer.echo(
            f"Version {version} is at {document['path']} (root hash {document['root_hash']})."
        )


@app.command()
def doctor(
    lake: Annotated[
        str | None,
        typer.Option("--lake", metavar="URI", help="Prove this lake's invariants instead."),
    ] = None,
    run_id: RunOption = None,
    store: Annotated[
        str | None, typer.Option(help="Where the runs' store is now; default: each run's own.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine: packages, processors, disk, clock and Prefect; or a lake."""
    from flows.doctor import checks, lake_checks

    found = checks() if lake is None else lake_checks(lake, run_id, store)
    if as_json:
        emit(found)
    else:
        shown = [name for name in found[0] if name != "faults"]
        print_rows(shown, [tuple(check[name] for name in shown) for check in found])
    if not all(check["ok"] for check in found):
        raise typer.Exit(1)


for commands in (
    replay_command,
    decision_commands,
    data_docs_command,
    interchange_commands,
    maintain_command,
):
    commands.register(app)
app.add_typer(weights, name="weights")


def main() -> None:
    """Console entry point: turns known failures into one sentence and an exit code."""
    try:
        app()
    except (ValueError, RuntimeError, OSError) as error:
        _fail(error, 2 if isinstance(error, ValueError) else 1)
    except Exception as error:
        from tasks.lake.lease import LeaseHeld
        from tasks.lake.ledger import LeaseLost

        if isinstance(error, LeaseHeld | LeaseLost):
            _fail(error, 1)
        if type(error).__module__.split(".")[0] in ("_duckdb", "duckdb", "deltalake"):
            _fail(f"The lake cannot be read ({error}); restore its directory from a backup.", 1)
        raise


def _fail(error: Exception | str, code: int) -> NoReturn:
    if os.environ.get("ROLLHOUSE_TRACEBACK"):
        traceback.print_exc()
    typer.echo(f"rollhouse: {error}", err=True)
    sys.exit(code)
