"""The command line as a person meets it: quick help, one sentence a fault, the right exit code."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest


def rollhouse(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from flows.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "200", **environment},
        timeout=120,
    )


def test_help_answers_in_under_half_a_second():
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        result = rollhouse("--help")
        seconds.append(time.perf_counter() - start)
        assert result.returncode == 0 and "weights" in result.stdout
    assert min(seconds) < 0.5, seconds


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "absent.toml"], "absent.toml: no such file"),
        (["run", "infra/runs/demo.toml", "--set", "run.sede=1"], "unknown key run.sede"),
        (["sql", "--lake", "absent", "SELECT 1"], "No lake at"),
        (["sql", "--lake", "gs://bucket/lake", "SELECT 1"], "s3://bucket/prefix"),
        (["status", "--lake", "absent"], "No lake at"),
        (["weights", "list", "--lake", "absent"], "No lake at"),
        (["trajectory", "--lake", "absent"], "No lake at"),
        (["describe", "nothing"], "no table or view nothing"),
        (["maintain", "--lake", "absent"], "No lake at"),
        (["replay", "--lake", "absent"], "No lake at"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(arguments: list[str], sentence: str):
    result = rollhouse(*arguments)
    assert result.returncode == 2, result.stderr
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_lake_option_names_the_variable():
    result = rollhouse("sql", "SELECT 1")
    assert result.returncode == 2 and "ROLLHOUSE_LAKE" in result.stdout + result.stderr


def test_views_and_describe_print_what_the_schemas_say():
    listed = json.loads(rollhouse("views", "--json").stdout)
    assert {"tokens", "segments", "mismatch_by_step"} <= {row["name"] for row in listed}
    assert all(row["description"] for row in listed)
    columns = json.loads(rollhouse("describe", "token_scores", "--json").stdout)
    assert all(row["description"] for row in columns)
    assert any(row["column"] == "delta" for row in columns)


def test_doctor_measures_this_machine(tmp_path: Path):
    result = rollhouse("doctor", "--json", HOME=str(tmp_path))
    found = {check["check"]: check for check in json.loads(result.stdout)}
    assert found["package torch"]["found"].startswith("2.13")
    assert found["fsync"]["found"].endswith("ms")
    assert result.returncode == (0 if all(check["ok"] for check in found.values()) else 1)
