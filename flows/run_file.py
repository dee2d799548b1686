"""Read a run TOML with its `--set key=value` overrides."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schemas.config import RunConfig, parse_run_config


def load_run_file(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run configuration in `path`.

    Raises `ValueError` with one sentence a fault, naming the file, the key and the fix.
    """
    try:
        data = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no such file; infra/runs/demo.toml is one to start from."
        ) from None
    except (IsADirectoryError, PermissionError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as text ({error}); give a run TOML.") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not valid TOML: {error}.") from None
    for override in overrides:
        apply_override(data, override)
    return parse_run_config(data, str(path))


def apply_override(data: dict[str, Any], override: str) -> None:
    """Sets `section.key=value` in parsed TOML; `ValueError` if it is not written so."""
    key, found, text = override.partition("=")
    parts = key.strip().split(".")
    if not found or not all(parts):
        raise ValueError(f"--set {override}: write section.key=value, for example run.seed=3.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        # A bare word is a string, so that a shell needs no second pair of quotes.
        value = text.strip()
    section = data
    for part in parts[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ValueError(f"--set {override}: {part} is a value, not a section.")
    section[parts[-1]] = value
