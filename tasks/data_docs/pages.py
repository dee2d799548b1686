"""The pages: an index for a run, one page a cycle and one a judgement, readable without a network.

Each is one HTML file with its style inside and no script. All follow from the lake alone, so they
may be deleted and built again at any time.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tasks.data_docs.judgements import (
    OUTCOMES,
    Judgement,
    read_decisions,
    read_judgements,
)
from tasks.data_docs.sentences import expectation_html
from tasks.decisions import answers
from tasks.lake.lake import Lake

TEMPLATES = Path(__file__).parent / "templates"

GATES = {
    0: "Probe: an engine before it gets traffic",
    1: "Gate 1: rollouts before admission",
    2: "Gate 2: a batch before its backward pass",
}

MAX_QUARANTINE_ROWS = 200
"""Listed on a page; the table `quarantine` has all."""


@dataclass(frozen=True)
class CycleSummary:
    """A cycle's judgements, and its rules by outcome over all of them."""

    number: int
    judgements: tuple[Judgement, ...]

    @property
    def folder(self) -> str:
        return f"cycle-{self.number:06d}"

    @property
    def counts(self) -> Counter[str]:
        return sum((judgement.counts for judgement in self.judgements), Counter())

    @property
    def verdicts(self) -> Counter[str]:
        return Counter(judgement.verdict for judgement in self.judgements)

    @property
    def num_quarantined(self) -> int:
        return len({row["trajectory_id"] for j in self.judgements for row in j.quarantined})


def write_data_docs(
    lake: Lake, run_id: str, folder: Path, cycles: Sequence[int] | None = None
) -> Path:
    """Writes the pages of a run below `folder` and returns its index page.

    `cycles` limits the work to those cycles and to those that have no pages yet.
    """
    judgements = read_judgements(lake, run_id)
    summaries = [
        CycleSummary(number, tuple(j for j in judgements if j.entry.cycle == number))
        for number in sorted({judgement.entry.cycle for judgement in judgements})
    ]
    decisions = read_decisions(lake, run_id)
    shared = {
        "run_id": run_id,
        "lake": lake.uri,
        "outcomes": OUTCOMES,
        "gates": GATES,
        "refusals": {j.entry.seq: j for j in judgements if j.gate and j.refused_by},
        "waiting": [judgement for judgement in judgements if judgement.verdict == "waiting"],
    }
    for summary in summaries:
        page = folder / summary.folder / "index.html"
        if cycles is None or summary.number in cycles or not page.is_file():
            _write_cycle(page.parent, summary, shared)
    index = folder / "index.html"
    _write(index, "index.html.j2", summaries=summaries, decisions=decisions, root=".", **shared)
    return index


def _write_cycle(folder: Path, summary: CycleSummary, shared: dict[str, Any]) -> None:
    for judgement in summary.judgements:
        _write(
            folder / f"{judgement.name}.html",
            "judgement.html.j2",
            judgement=judgement,
            summary=summary,
            max_rows=MAX_QUARANTINE_ROWS,
            root="..",
            **shared,
        )
    # The cycle's own page last: where it is, all that it links to is there.
    _write(folder / "index.html", "cycle.html.j2", summary=summary, root="..", **shared)


@cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = lambda value: "" if value is None else f"{value:.6g}"
    environment.filters["moment"] = lambda value: f"{value:%Y-%m-%d %H:%M:%S} UTC"
    environment.globals["expectation_html"] = expectation_html
    environment.globals["answers"] = _answers
    return environment


def _answers(judgement: Judgement, run_id: str, lake_uri: str) -> tuple[str, ...]:
    rules = [finding.rule for finding in judgement.refused_by]
    return answers(lake_uri, run_id, judgement.entry.seq, rules)


def _write(path: Path, template: str, **values: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _environment().get_template(template).render(**values)
    # Whoever reads meanwhile sees the old page or the new one.
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
