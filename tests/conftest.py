"""Fixtures that several rooms' tests share."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tasks.warm_start import starting_checkpoint
from tests.s3_server import BUCKET, S3Server
from tests.tiny_run import TinyRun


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shares the tests between two workers: a file is one's, the long ones come first, and vLLM
    servers start one after another because each wants both cores."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            is_vllm = item.get_closest_marker("vllm") is not None
            item.add_marker(pytest.mark.xdist_group("vllm" if is_vllm else item.path.stem))


@pytest.fixture(scope="session")
def tiny_policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that holds the tiny run's policy, made once."""
    cache = tmp_path_factory.mktemp("policies")
    starting_checkpoint(TinyRun(cache, cache).config)
    return cache


@pytest.fixture(scope="session")
def finished_run(
    tmp_path_factory: pytest.TempPathFactory, tiny_policies: Path
) -> tuple[TinyRun, dict[str, Any]]:
    """The tiny run, taken through the command line and Prefect, with its `--json` document; to be
    looked at only."""
    tiny = TinyRun(tmp_path_factory.mktemp("finished"), tiny_policies)
    result = tiny.run("--json")
    assert result.returncode == 0, result.stderr
    return tiny, json.loads(result.stdout)


@pytest.fixture
def tiny_run(tmp_path: Path, tiny_policies: Path) -> Callable[..., TinyRun]:
    """Makes a fresh run with the given `--set` overrides."""

    def make(*settings: str, name: str = "run", place: str | None = None) -> TinyRun:
        root = tmp_path / name
        root.mkdir()
        return TinyRun(root, tiny_policies, settings, place)

    return make


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    server.create_bucket(BUCKET)
    yield server
    server.stop()


@pytest.fixture
def s3_uri(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty prefix of a real bucket, and the environment in which clients may use it."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid4().hex[:12]}"


@pytest.fixture(params=["disk", "s3"])
def lake_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a lake may be made: each test that asks runs on a disk and in a bucket."""
    if request.param == "s3":
        return request.getfixturevalue("s3_uri")
    return str(tmp_path / "lake")


@pytest.fixture
def own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server that the test may stop and start, and the environment in which clients use it."""
    server = S3Server(tmp_path / "server")
    server.start()
    server.create_bucket(BUCKET)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()
