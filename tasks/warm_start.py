"""Where version 0 comes from: the run file's checkpoint, or a warm start made once and cached.

The cache is keyed by a hash of everything that made the policy, this project's own source of it
included, so an edit makes a new one and an interrupted run leaves nothing that looks finished.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from schemas.config import RunConfig, WarmStart
from tasks.environments import make_environment
from tasks.environments.protocol import Environment
from tasks.renderers import Renderer
from tasks.train import log_end, torchrun

if TYPE_CHECKING:
    from tasks.policy import Problem

_ROOMS = Path(__file__).parents[1]
SOURCES = (
    "tasks/environments/reasoning_gym.py",
    "tasks/policy.py",
    "tasks/renderers.py",
    "tasks/seeds.py",
    "tasks/warm_start.py",
    "trainers/loss_positions.py",
    "trainers/loss_scale.py",
    "trainers/losses.py",
    "trainers/optimizer.py",
    "trainers/packing.py",
    "trainers/policy.py",
    "trainers/prefixes.py",
    "trainers/ranks.py",
    "trainers/supervised.py",
    "trainers/token_logprobs.py",
    "trainers/tree_attention.py",
)
PACKAGES = ("reasoning-gym", "tokenizers", "torch", "transformers")


class WarmStartFailed(RuntimeError):
    """The supervised run ended with an error."""


def starting_checkpoint(config: RunConfig) -> Path:
    """The Hugging Face folder that becomes version 0.

    Raises `ValueError` if the run file names a folder that does not exist, `WarmStartFailed` if
    the supervised run fails.
    """
    if config.policy.path is not None:
        folder = Path(config.policy.path)
        if not folder.is_dir():
            raise ValueError(
                f"policy.path: {folder} is not a folder; give a Hugging Face checkpoint folder, or "
                "a [policy.warm_start] table."
            )
        return folder
    settings = config.policy.warm_start
    assert settings is not None, "a policy has a path or a warm start"
    environment = make_environment(config.environment.name, config.environment.options)
    return ensure_warm_start(settings, config, environment)


def warm_start_key(settings: WarmStart, config: RunConfig) -> str:
    """16 hex digits over settings, environment, and the code and packages that make the policy."""
    made_of = {
        "settings": settings.model_dump(mode="json", exclude={"cache"}),
        "environment": config.environment.model_dump(mode="json"),
        "ranks": config.trainer.ranks,
        "sources": {name: (_ROOMS / name).read_text() for name in SOURCES},
        "packages": {name: version(name) for name in PACKAGES},
    }
    return hashlib.blake2b(json.dumps(made_of, sort_keys=True).encode(), digest_size=8).hexdigest()


def ensure_warm_start(settings: WarmStart, config: RunConfig, environment: Environment) -> Path:
    """The cached policy, made now if there is none."""
    cache = Path(settings.cache).absolute()
    finished = cache / warm_start_key(settings, config)
    if finished.is_dir():
        return finished
    # Here, since it loads a model's code, which a run whose policy is made has no use for.
    from tasks.policy import forgetful_answers, training_problems, write_initial_policy

    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".making-") as folder:
        scratch = Path(folder)
        problems = list(training_problems(environment, settings.num_problems, settings.seed))
        texts = [
            text
            for messages, answer in problems
            for text in (*(m["content"] for m in messages), answer)
        ]
        write_initial_policy(scratch / "initial", settings, texts)
        supervise = partial(_supervise, scratch, settings, config, cache / "logs" / finished.name)
        made = supervise("initial", "skilled", problems, settings.steps, settings.learning_rate)
        if (habit := settings.habit) is not None:
            forgetful = list(
                forgetful_answers(problems, habit.forgotten_carry_share, settings.seed)
            )
            made = supervise("skilled", "habitual", forgetful, habit.steps, habit.learning_rate)
        # Another run may have made the same policy meanwhile; either will do.
        if not finished.is_dir():
            os.rename(made, finished)
    return finished


def _supervise(
    scratch: Path,
    settings: WarmStart,
    config: RunConfig,
    logs: Path,
    start: str,
    result: str,
    problems: "Sequence[Problem]",
    steps: int,
    learning_rate: float,
) -> Path:
    """One supervised run from `scratch/start` to `scratch/result`, which it returns."""
    from tasks.policy import write_examples

    data = scratch / f"{result}.parquet"
    write_examples(data, Renderer(scratch / start), problems)
    arguments = {
        "--init": scratch / start,
        "--data": data,
        "--out": scratch / result,
        "--steps": steps,
        "--batch-sequences": settings.batch_sequences,
        "--learning-rate": learning_rate,
        "--seed": settings.seed,
        "--threads": config.trainer.threads,
    }
    log = logs / f"{result}.log"
    with torchrun(
        "trainers.supervised",
        arguments,
        ranks=config.trainer.ranks,
        threads=config.trainer.threads,
        log=log,
    ) as process:
        try:
            code = process.wait()
        finally:
            # torchrun passes the signal on to its ranks, which a kill would leave running.
            process.terminate()
    if code != 0:
        raise WarmStartFailed(
            f"The supervised warm start ended with code {code}; its log is {log}. The log "
            f"ends:\n{log_end(log)}"
        )
    return scratch / result
