"""What the documentation says can be done, can be done: commands, links, queries, snippets."""

import inspect
import re
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import typer

from flows.cli import app
from flows.reference import page
from flows.run_file import load_run_file
from schemas.config import RunConfig
from schemas.tables import TABLES
from tasks.environments.reasoning_gym import ReasoningGym
from tasks.lake.lake import Lake
from tasks.lake.lease import take_lease
from tasks.query import connect, run_query
from tests.factories import window

DOCS = [Path("README.md"), Path("CONTRIBUTING.md"), *sorted(Path("docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

by_page = pytest.mark.parametrize("file", DOCS, ids=lambda file: file.name)


def blocks(file: Path, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(file.read_text()) if name == language]


def spans(file: Path) -> list[str]:
    """Inline code outside fenced blocks, on one line each."""
    prose = FENCE.sub("", file.read_text())
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def shell_commands(file: Path, program: str) -> list[list[str]]:
    """Arguments of every line in a shell block that runs `program`."""
    lines = [shlex.split(line, comments=True) for b in blocks(file, "sh") for line in b.split("\n")]
    return [words[1:] for words in lines if words[:1] == [program]]


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that `words` name, and its arguments."""
    command: Any = typer.main.get_command(app)
    while words and not words[0].startswith("-") and hasattr(command, "commands"):
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


def parameters(words: list[str]) -> dict[str, Any]:
    command, arguments = find_command(words)
    return command.make_context(command.name, arguments).params


def test_the_reference_is_what_the_code_prints():
    assert Path("docs/reference.md").read_text() == page(), "run `make docs`"


@by_page
def test_every_command_in_a_shell_block_parses(file: Path):
    for words in shell_commands(file, "rollhouse"):
        assert parameters(words)


@by_page
def test_every_command_in_the_text_exists_with_its_options(file: Path):
    for span in spans(file):
        if span.startswith("rollhouse "):
            command, arguments = find_command(shlex.split(span)[1:])
            context = command.make_context(command.name, [], resilient_parsing=True)
            # Placeholders stand for values here, so names are checked and types are not.
            _, left, _ = command.make_parser(context).parse_args(arguments)
            assert not left, f"{file}: {span} has arguments that its command does not take"


def test_options_that_stand_alone_in_the_text_are_options_of_some_command():
    top: Any = typer.main.get_command(app)
    commands = [*top.commands.values(), *top.commands["weights"].commands.values()]
    known = {o for c in commands for p in c.params for o in (*p.opts, *p.secondary_opts)}
    named = {span.split()[0] for file in DOCS for span in spans(file) if span.startswith("--")}
    assert named and named <= known


@by_page
def test_every_make_target_exists(file: Path):
    targets = set(re.findall(r"^([a-z-]+):", Path("Makefile").read_text(), re.MULTILINE))
    named = [words[0] for words in shell_commands(file, "make")]
    named += [span.split()[1] for span in spans(file) if span.startswith("make ")]
    assert set(named) <= targets


def anchors(file: Path) -> Iterator[str]:
    """Fragments that a page's headings answer to, as GitHub makes them."""
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", file.read_text()), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@by_page
def test_every_relative_link_resolves(file: Path):
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", FENCE.sub("", file.read_text()))
    for target, fragment in links:
        path = file.parent / target if target else file
        assert path.exists(), f"{file}: {target}"
        if fragment:
            assert fragment in anchors(path), f"{file}: {target}#{fragment}"


def queries(file: Path) -> list[str]:
    commands = [parameters(words) for words in shell_commands(file, "rollhouse")]
    return [*blocks(file, "sql"), *(c["query"] for c in commands if c.get("query"))]


def test_every_query_runs(tmp_path: Path):
    connection = connect(Lake.create(tmp_path))
    found = [query for file in DOCS for query in queries(file)]
    assert len(found) > 5
    for query in found:
        names, _ = run_query(connection, query)
        assert names


def keys(section: type, prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        options = getattr(field.annotation, "__args__", (field.annotation,))
        for option in options:
            if hasattr(option, "model_fields"):
                yield from keys(option, f"{prefix}{name}.")


@by_page
def test_every_run_file_key_exists(file: Path):
    known = set(keys(RunConfig))
    sections = "|".join(RunConfig.model_fields)
    named = [s for s in spans(file) if re.fullmatch(rf"({sections})\.[a-z_.]+", s)]
    assert set(named) <= known


def test_settings_on_the_command_line_are_accepted():
    for file in DOCS:
        for words in shell_commands(file, "rollhouse"):
            if words[0] == "run":
                given = parameters(words)
                assert load_run_file(given["run_file"], given["set_"] or [])


def test_the_environment_options_are_those_of_the_environment():
    table = Path("docs/operations.md").read_text().partition("[environment.options]")[2]
    named = re.findall(r"^\| `(\w+)` \|", table.partition("## ")[0], re.MULTILINE)
    assert named == [n for n in inspect.signature(ReasoningGym).parameters if n != "unknown"]


@pytest.fixture
def tiny_lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """A lake where the snippets look for it: one write that the ledger names, one that it does
    not, in `segments` and in `steps`."""
    monkeypatch.chdir(tmp_path)
    lake = Lake.create("var/demo/lake")
    ledger = lake.ledger("demo")
    ledger.append("run_created", lease=0)
    lease = take_lease(ledger)

    def append(table: str, rows: list[dict[str, Any]]) -> str:
        typed = pa.Table.from_pylist(rows, schema=TABLES[table].own_schema)
        return lake.append(table, typed, run_id="demo", cycle=0, lease=lease)

    def write(seed: int, step: int) -> list[str]:
        segments = [row for rollout in window(seed) for row in rollout.segments]
        values = {"step": step, "reward_mean": 0.5, "max_w": 1.0, "finished_at": datetime.now(UTC)}
        return [append("segments", segments), append("steps", [values])]

    ledger.append("rollouts_recorded", lease=lease, write_ids=write(seed=0, step=1))
    write(seed=1, step=2)
    return lake


def test_the_snippets_read_what_counts(tiny_lake: Lake, capsys: pytest.CaptureFixture[str]):
    source = (Path(__file__).parents[2] / "docs" / "lake.md").read_text()
    duckdb_snippet, pyarrow_snippet = (b for name, b in FENCE.findall(source) if name == "python")
    found: dict[str, Any] = {}
    exec(duckdb_snippet, found)
    own = tiny_lake.read("segments", run_id="demo", where="kind = 'action'")
    assert found["counted"].select(["token_ids"]) == own.select(["token_ids"])
    assert capsys.readouterr().out == "16 action segments\n"
    exec(pyarrow_snippet, found := {})
    assert found["counted"]["step"].to_pylist() == [1]
    assert capsys.readouterr().out == "[{'step': 1, 'reward_mean': 0.5, 'max_w': 1.0}]\n"
