"""The pages say what stopped a run, why and who answered, and need nothing but themselves."""

import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tasks.data_docs.judgements import read_judgements
from tasks.data_docs.pages import write_data_docs
from tasks.decisions import decide
from tests.refused_lake import RUN_ID, RefusedLake

SLY = "<script src='https://evil.example/x.js'></script>"


@pytest.fixture
def story(tmp_path: Path) -> RefusedLake:
    """A recorded window with a quarantined trajectory, a batch that was refused and waived, and one
    that waits."""
    run = RefusedLake(tmp_path)
    recorded = run.results(
        1,
        "window of 8 groups",
        logprobs_present=("row", 2.0, False),
        row_fault_share=("batch", 0.1, True),
        length_drift=("warning", 0.5, False),
    )
    left_out = {"group_id": 7, "rule": "logprobs_present", "observed": 2.0, "reason": "NaN"}
    quarantine = run.write(
        "quarantine", [{"trajectory_id": "00000007-000-0", "action": "quarantine", **left_out}]
    )
    run.ledger.append(
        "rollouts_recorded",
        lease=run.lease,
        num_trajectories=32,
        write_ids=[recorded, quarantine],
    )
    refusal = run.refuse("logprobs_aligned")
    waived = decide(
        run.lake, RUN_ID, refusal.seq, rules=["logprobs_aligned"], reviewer="Ada", reason=SLY
    )
    adopted = run.adopt(waived)
    again = run.write(
        "validations",
        [
            row | {"waived_by": None if row["ok"] else adopted.seq}
            for row in run.lake.read("validations", run_id=RUN_ID, write_ids=refusal.write_ids)
            .drop_columns(["run_id", "cycle", "write_id"])
            .to_pylist()
        ],
    )
    details = {"admission": refusal.details["admission"], "refusal": refusal.seq}
    run.ledger.append(
        "batch_accepted",
        lease=run.lease,
        batch=1,
        num_trajectories=4,
        write_ids=[again],
        details=details,
    )
    run.refuse("own_version_mismatch")
    return run


class Visible(HTMLParser):
    """What a browser loads, and what a person reads."""

    def __init__(self, page: Path):
        super().__init__()
        self.loads: list[str] = []
        self.words: list[str] = []
        self.tags: set[str] = set()
        self._styled = False
        self.feed(page.read_text())
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._styled = tag == "style"
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_data(self, data: str) -> None:
        if self._styled:
            self.loads += re.findall(r"(?:@import\s+|url\()[^;)]*", data)
        else:
            self.words.append(data)


def test_no_page_loads_anything_from_elsewhere_and_every_link_leads_somewhere(
    story, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    write_data_docs(story.lake, RUN_ID, tmp_path / "docs")
    assert caplog.text == "", "the renderer has nothing to complain about"
    pages = sorted((tmp_path / "docs").rglob("*.*"))
    assert len(pages) == 2 + 4 and {page.suffix for page in pages} == {".html"}
    for page in pages:
        seen = Visible(page)
        assert "script" not in seen.tags
        for load in seen.loads:
            assert load == "data:," or (page.parent / load).is_file(), load


def test_the_index_says_what_stopped_the_run_and_who_answered(story, tmp_path: Path):
    index = Visible(write_data_docs(story.lake, RUN_ID, tmp_path / "docs")).text
    waiting = max(story.ledger.entries, key=lambda e: e.seq).seq
    assert f"Refusal {waiting} waits for a person." in index
    assert "own_version_mismatch observed 0.5, allowed <= 0.25" in index
    assert "Protects against: An engine that served other weights than it says" in index
    assert f"rollhouse waive --lake {story.lake.uri} --run r --refusal {waiting}" in index
    assert "logprobs_aligned Ada " + SLY in index, "a reason is shown as it was written"
    # Four judgements, two of them refusals; one rule refused in each, one waived, one each else.
    assert "cycle 0 4 2 2 1 2 1 1 1 4" in index


def test_a_judgement_says_why_its_rules_exist(story, tmp_path: Path):
    write_data_docs(story.lake, RUN_ID, tmp_path / "docs")
    outcomes = {
        judgement.name: {f.rule: f.outcome for f in judgement.findings}
        for judgement in read_judgements(story.lake, RUN_ID)
    }
    assert list(outcomes.values()) == [
        {"logprobs_present": "quarantined", "length_drift": "warned", "row_fault_share": "held"},
        {"logprobs_aligned": "refused", "audit_present": "held"},
        {"logprobs_aligned": "waived", "audit_present": "held"},
        {"own_version_mismatch": "refused", "audit_present": "held"},
    ]
    texts = [Visible(tmp_path / "docs" / "cycle-000000" / f"{name}.html").text for name in outcomes]
    assert "An importance weight without a denominator." in texts[0]
    assert "00000007-000-0 logprobs_present quarantine 2 NaN" in texts[0]
    assert "Log-probabilities shifted by one position." in texts[1]
    assert "Ada waived logprobs_aligned" in texts[1]
    assert "accepted, rules waived" in texts[2] and "Waived by Ada on" in texts[2]
    assert "logprobs_aligned maximum value must be less than or equal to 0.25" in texts[2], (
        "Great Expectations words its expectation"
    )


def test_the_same_lake_gives_the_same_pages_and_only_the_asked_cycle_is_written(story, tmp_path):
    folder = tmp_path / "docs"
    write_data_docs(story.lake, RUN_ID, folder)
    first = {page: page.read_bytes() for page in folder.rglob("*.html")}
    shutil.rmtree(folder)
    write_data_docs(story.lake, RUN_ID, folder, cycles=[])
    assert {page: page.read_bytes() for page in folder.rglob("*.html")} == first
    page = folder / "cycle-000000" / "index.html"
    page.write_text("old")
    write_data_docs(story.lake, RUN_ID, folder, cycles=[1])
    assert page.read_text() == "old", "it has pages and was not asked for"
    write_data_docs(story.lake, RUN_ID, folder, cycles=[0])
    assert page.read_bytes() == first[page]


def test_a_cycle_of_many_batches_takes_at_most_two_seconds(story, tmp_path: Path):
    write_data_docs(story.lake, RUN_ID, tmp_path / "warm")
    for _ in range(20):
        story.refuse("logprobs_aligned")
    start = time.process_time()
    write_data_docs(story.lake, RUN_ID, tmp_path / "docs")
    assert time.process_time() - start < 2.0
