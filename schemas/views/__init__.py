"""Analysis views: one SQL file each, whose header gives columns, units and formulas."""

from functools import cache
from importlib.resources import files


@cache
def view_sources() -> dict[str, str]:
    """SQL text of every view by name, in an order that defines a view after those it reads."""
    order = (
        "tokens_all",
        "tokens",
        "step_trajectories",
        "token_scores",
        "mismatch_by_step",
        "staleness_by_step",
        "signals_by_step",
        "trajectory_ends",
    )
    folder = files(__name__)
    return {name: folder.joinpath(f"{name}.sql").read_text() for name in order}


def view_title(sql: str) -> str:
    """What a view's header says first, without its name: its first paragraph."""
    lines = []
    for line in sql.splitlines():
        text = line.removeprefix("--").strip()
        if not line.startswith("--") or not text:
            break
        lines.append(text)
    return " ".join(lines).partition(": ")[2]
