"""`rollhouse import` and `rollhouse export` as a person meets them."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.unit.flows.test_cli import rollhouse

EPISODES = "tests/fixtures/prime_rl"


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A lake with an imported run."""
    lake = str(tmp_path_factory.mktemp("lake"))
    result = import_into(lake, EPISODES, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["trajectories"] == 3
    return lake


def import_into(lake: str, path: str, *more: str) -> subprocess.CompletedProcess[str]:
    return rollhouse("import", path, "--lake", lake, "--run", "r", "--from", "prime-rl", *more)


def test_an_import_for_people_says_what_is_missing_and_kept(lake: str, tmp_path: Path):
    result = import_into(str(tmp_path / "other"), EPISODES)
    assert "3 rollouts in 2 groups with 25 tokens are in run r." in result.stdout
    assert "token_ids_recorded" in result.stdout
    assert "kept in origin_details: env.id" in result.stdout
    again = import_into(lake, EPISODES)
    assert again.returncode == 0 and "its content was imported before" in again.stdout


def test_the_inspecting_commands_show_an_imported_run(lake: str):
    [status] = json.loads(rollhouse("status", "--lake", lake, "--json").stdout)
    assert status["waiting_for"] == "nothing" and status["groups_waiting"] == 0
    shown = rollhouse("trajectory", "00000000-000-0", "--lake", lake, "--json")
    tokens = json.loads(shown.stdout)["tokens"]
    assert [t["token_id"] for t in tokens[:8]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert tokens[6]["text"] is None and tokens[6]["log_mu"] == -0.1235
    without = rollhouse("trajectory", "00000000-001-0", "--lake", lake)
    assert without.returncode == 0, without.stderr


def test_an_export_of_a_query(lake: str, tmp_path: Path):
    to = tmp_path / "tokens.jsonl"
    query = "SELECT token_id, rollout_logprob FROM tokens WHERE kind = 'action' ORDER BY ALL"
    arguments = ["export", "--lake", lake, "--query", query, "--format", "jsonl", "--to", str(to)]
    result = rollhouse(*arguments, "--json")
    assert json.loads(result.stdout)["rows"] == 6
    assert to.read_text().splitlines()[0] == '{"token_id":7,"rollout_logprob":-0.1235}'
    again = rollhouse(*arguments)
    assert again.returncode == 2 and "exists; give --to a path that does not" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["export", "--format", "jsonl", "--to", "x"], "Give either --batch N or --query SQL."),
        (["export", "--format", "jsonl", "--to", "x", "--batch", "1"], "no batch 1; it has none"),
        (
            ["export", "--format", "hf", "--to", "x", "--query", "DROP TABLE ledger"],
            "the lake is read-only here",
        ),
        (
            ["import", "absent", "--run", "r", "--from", "verl"],
            "absent: no such file or folder",
        ),
        (
            ["import", EPISODES, "--run", "r", "--from", "trl"],
            "holds no rollouts as trl writes them",
        ),
        (
            ["import", EPISODES, "--run", "r", "--from", "trl", "--reward", "exact"],
            "give NAME=WEIGHT",
        ),
    ],
)
def test_bad_input_to_interchange_is_one_sentence(lake: str, arguments: list[str], sentence: str):
    result = rollhouse(*arguments, "--lake", lake)
    assert result.returncode == 2, result.stderr
    assert sentence in result.stderr and "Traceback" not in result.stderr
    assert not Path("x").exists()
