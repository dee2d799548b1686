"""`rollhouse maintain`: compact, expire by policy, drop what never counted, vacuum."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flows.cli_output import JsonOption, LakeOption, emit, pick_run, print_rows

if TYPE_CHECKING:
    from schemas.config import MaintenanceSection
    from tasks.lake.lake import Lake
    from tasks.maintain import TableReport


def maintain(
    lake: LakeOption,
    run_id: Annotated[
        str | None, typer.Option("--run", help="Run id; default: every run of the lake.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing; print what would be done.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a key of the run's maintenance policy."
        ),
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="Where the run's store is now; default: the run's own.")
    ] = None,
    prefect: Annotated[
        bool, typer.Option(help="Maintain each run as a Prefect flow run (embedded API).")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compact closed cycles, expire rows and checkpoints by policy, drop writes that never counted,
    vacuum."""
    from flows.prefect_cycle import prefect_api
    from tasks.lake.lake import Lake

    opened = Lake.open(lake)
    runs = opened.run_ids()
    names = runs if run_id is None else [pick_run(runs, run_id, lake)]
    policies = {name: _policy(opened, name, set_ or []) for name in names}
    reports: list[TableReport] = []
    with prefect_api() if prefect else nullcontext():
        for name, policy in policies.items():
            with Console(stderr=True).status(f"Maintaining run {name}"):
                reports += _maintain(opened, name, policy, dry_run, prefect, store)
    if as_json:
        emit([asdict(report) for report in reports])
        return
    for name, policy in policies.items():
        shown = [asdict(report) for report in reports if report.run_id == name]
        _print_run(name, policy, shown, dry_run)


def _policy(lake: "Lake", run_id: str, overrides: Sequence[str]) -> "MaintenanceSection":
    from flows.run_file import apply_override
    from schemas.config import parse_maintenance
    from tasks.maintain import run_policy

    data: dict[str, Any] = {"maintenance": run_policy(lake.ledger(run_id)).model_dump()}
    for override in overrides:
        if not override.startswith("maintenance."):
            raise ValueError(
                f"--set {override}: only keys of [maintenance] can be set here, for example "
                "maintenance.tokens_days=90."
            )
        apply_override(data, override)
    return parse_maintenance(data["maintenance"], f"run {run_id}")


def _maintain(
    lake: "Lake",
    run_id: str,
    policy: "MaintenanceSection",
    dry_run: bool,
    prefect: bool,
    store: str | None,
) -> "list[TableReport]":
    from tasks.maintain import maintain_run

    now = datetime.now(UTC)
    if not prefect:
        return maintain_run(lake, run_id, policy, now=now, dry_run=dry_run, store_uri=store)
    return maintain_as_flow(lake, run_id, policy, now=now, dry_run=dry_run, store_uri=store)


def maintain_as_flow(
    lake: "Lake",
    run_id: str,
    policy: "MaintenanceSection",
    *,
    now: datetime,
    dry_run: bool,
    store_uri: str | None = None,
) -> "list[TableReport]":
    """A maintenance as one run of the flow `maintain`, a task a phase."""
    from prefect import flow

    from flows.prefect_cycle import phases_as_tasks
    from tasks.maintain import Phases, maintain_run

    phases = phases_as_tasks(Phases())

    @flow(name="maintain", flow_run_name="{run_id}", persist_result=False)
    def maintain_flow(run_id: str, dry_run: bool) -> "list[TableReport]":
        return maintain_run(
            lake, run_id, policy, now=now, dry_run=dry_run, phases=phases, store_uri=store_uri
        )

    return maintain_flow(run_id, dry_run)


def _print_run(
    run_id: str, policy: "MaintenanceSection", shown: list[dict[str, Any]], dry_run: bool
) -> None:
    kept = ", ".join(f"{key} {_kept(key, value)}" for key, value in policy.model_dump().items())
    typer.echo(f"Run {run_id}{' (dry run, nothing was changed)' if dry_run else ''}: {kept}")
    rows = [tuple(row.values())[1:] for row in shown]
    print_rows([name.replace("_", " ") for name in _COLUMNS], rows)


def _kept(key: str, value: float | None) -> str:
    if value is not None:
        return f"{value:g}"
    return "all" if key == "keep_checkpoints" else "kept for good"


_COLUMNS = (
    "table",
    "files_before",
    "files_after",
    "rows_expired",
    "rows_dropped",
    "bytes_released",
    "files_deleted",
    "bytes_freed",
    "files_skipped",
)


def register(app: typer.Typer) -> None:
    app.command()(maintain)
