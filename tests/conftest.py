"""Fixtures that several rooms' tests share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.warm_start import starting_checkpoint
from tests.tiny_run import TinyRun


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

    def make(*settings: str, name: str = "run") -> TinyRun:
        root = tmp_path / name
        root.mkdir()
        return TinyRun(root, tiny_policies, settings)

    return make
