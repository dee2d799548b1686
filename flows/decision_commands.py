"""The reviewer's commands: `rollhouse approve` and `rollhouse waive`."""

import getpass
from typing import Annotated, Any

import typer

from flows.cli_output import JsonOption, LakeOption, RunOption, emit, pick_run

RefusalOption = Annotated[
    int, typer.Option("--refusal", help="The seq that `rollhouse status` and the refusal name.")
]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; recorded for good.")]
ReviewerOption = Annotated[
    str | None, typer.Option("--reviewer", help="Who decides; default: the user of this process.")
]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        raise ValueError("The user of this process has no name; give --reviewer NAME.") from None


def _decide(
    lake: str,
    run_id: str | None,
    refusal: int,
    rules: list[str],
    reason: str,
    reviewer: str | None,
    as_json: bool,
) -> dict[str, Any]:
    from tasks.decisions import decide
    from tasks.lake.lake import Lake

    opened = Lake.open(lake)
    decided = decide(
        opened,
        pick_run(opened.run_ids(), run_id, lake),
        refusal,
        rules=rules,
        reviewer=_user() if reviewer is None else reviewer,
        reason=reason,
    )
    if as_json:
        emit(decided)
    return decided


def approve(
    lake: LakeOption,
    refusal: RefusalOption,
    reason: ReasonOption,
    reviewer: ReviewerOption = None,
    run_id: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Confirm a refusal: the data stays refused, and the run goes on with other rollouts."""
    decided = _decide(lake, run_id, refusal, [], reason, reviewer, as_json)
    if not as_json:
        typer.echo(
            f"{decided['reviewer']} confirmed refusal {refusal} of run {decided['run_id']}; the "
            "next `rollhouse run` goes on with other rollouts."
        )


def waive(
    lake: LakeOption,
    refusal: RefusalOption,
    rule: Annotated[list[str], typer.Option("--rule", help="Rule that refused; repeatable.")],
    reason: ReasonOption,
    reviewer: ReviewerOption = None,
    run_id: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Waive rules on exactly the refused data: it is judged again without them, and used."""
    decided = _decide(lake, run_id, refusal, rule, reason, reviewer, as_json)
    if not as_json:
        typer.echo(
            f"{decided['reviewer']} waived {', '.join(decided['rules'])} on refusal {refusal} of "
            f"run {decided['run_id']}; the next `rollhouse run` judges the same data again without "
            "that."
        )


def register(app: typer.Typer) -> None:
    app.command()(approve)
    app.command()(waive)
