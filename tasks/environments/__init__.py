"""Environments by the name that a run file gives."""

from collections.abc import Mapping
from typing import Any

from tasks.environments.protocol import Environment, ScorerError, Task, Verdict

__all__ = ["Environment", "ScorerError", "Task", "Verdict", "make_environment"]


def make_environment(name: str, options: Mapping[str, Any]) -> Environment:
    """The environment `name` with the options of the run file's `[environment.options]`.

    Raises `ValueError` naming the key and the fix.
    """
    if name == "reasoning_gym":
        from tasks.environments.reasoning_gym import ReasoningGym

        try:
            return ReasoningGym(**options)
        except TypeError as error:
            raise ValueError(
                f"environment.options: a value has the wrong type ({error}); docs/operations.md "
                "lists the options."
            ) from None
    raise ValueError(f"environment.name: no environment {name!r}; use reasoning_gym.")
