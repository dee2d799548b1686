"""A reviewer at the command line: what is open, how it is answered, and what is refused."""

import getpass
import json
import subprocess
import sys
from pathlib import Path

from tests.refused_lake import RUN_ID, RefusedLake


def rollhouse(run: RefusedLake, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from flows.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "200", "ROLLHOUSE_LAKE": run.lake.uri},
        timeout=120,
    )


def test_a_refusal_is_shown_answered_once_and_never_again(tmp_path: Path):
    run = RefusedLake(tmp_path)
    refusal = str(run.refuse("logprobs_aligned", "own_version_mismatch").seq)
    (status,) = json.loads(rollhouse(run, "status", "--json").stdout)
    assert status["waiting_for"] == f"a decision on refusal {refusal}"
    assert status["open_refusal"] == "it is bad"

    asked = ("waive", "--refusal", refusal, "--rule", "logprobs_aligned", "--reason")
    blank = rollhouse(run, *asked, " ")
    assert blank.returncode == 2 and "--reason is empty" in blank.stderr
    assert blank.stdout == "" and "Traceback" not in blank.stderr
    done = rollhouse(run, *asked, "looked at", "--rule", "own_version_mismatch", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["rules"] == ["logprobs_aligned", "own_version_mismatch"]
    assert (document["decision"], document["reviewer"]) == ("waive", getpass.getuser())
    again = rollhouse(run, "approve", "--refusal", refusal, "--reason", "no")
    assert again.returncode == 2 and "was decided already: waive by" in again.stderr
    rows = run.lake.read("decisions", run_id=RUN_ID, write_ids="all").to_pylist()
    assert {(row["reason"], row["write_id"]) for row in rows} == {
        ("looked at", document["write_id"])
    }


def test_an_approval_says_what_happens_next(tmp_path: Path):
    run = RefusedLake(tmp_path)
    refusal = str(run.refuse("logprobs_aligned").seq)
    done = rollhouse(
        run, "approve", "--refusal", refusal, "--reason", "mended", "--reviewer", "Ada"
    )
    assert done.returncode == 0
    assert done.stdout.startswith(f"Ada confirmed refusal {refusal} of run r; the next")


def test_the_data_docs_are_built_from_any_lake(tmp_path: Path):
    run = RefusedLake(tmp_path)
    run.refuse("logprobs_aligned")
    done = rollhouse(run, "data-docs", "--to", str(tmp_path / "docs"), "--json")
    assert done.returncode == 0, done.stderr
    index = Path(json.loads(done.stdout)["data_docs"])
    assert index == tmp_path / "docs" / "index.html" and "logprobs_aligned" in index.read_text()
    assert done.stderr == ""
