"""Trains batches of a run again, as they were recorded, and says what came out otherwise.

    python -m torch.distributed.run --standalone --nproc-per-node R -m trainers.replay_job \\
        --lake URI --run-id ID --store URI --cache DIR --plan FILE --report FILE --threads T

It computes with the functions of `trainers.job` and writes to neither lake nor store: `--cache` is
where weights made from patches go, and `--report` gets one JSON line a batch of the plan, in its
order. The plan is a JSON list of `batch` and `start`, the newest batch before it whose checkpoint
is kept, or 0 for version 0. Standard input is the controller's pipe, as in `trainers.job`.

A batch is trained with the scores that gate 2 accepted, on as many threads as its `steps` rows say.
"""

import argparse
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schemas.config import RunConfig, parse_recorded_config
from tasks.lake import Entry, Lake, Ledger
from tasks.weights import checkpoints
from tasks.weights.anchors import read_anchor
from tasks.weights.hashing import root_hash, root_hash_of_stream, tensor_hash
from tasks.weights.store import elsewhere, open_store
from tasks.weights.versions import find_chain, tensor_hashes
from trainers import checkpoint, ranks
from trainers.comparison import score_differences, step_differences, tensor_difference
from trainers.corrections import Correction
from trainers.hardware import cpu_threads
from trainers.job import fetched, make_trainer, publication, score_batch
from trainers.optimizer import MasterAdamW
from trainers.policy import Policy
from trainers.recorded import Recorded, read_recorded
from trainers.scoring import Scores, correct, scores_table
from trainers.sequences import minibatches
from trainers.steps import Row, train_batch

log = logging.getLogger(__name__)

PLACE = ("hardware", "processor", "software")
"""Columns of `steps` that say what computed a step."""


class NotReplayed(ValueError):
    """What is recorded of a batch cannot be trained."""


@dataclass
class Replay:
    """One rank's part. The weights stand after batch `at`, and were come to from `origin`; `exact`
    says that they are the recorded ones, None for `at` that they are not known."""

    config: RunConfig
    lake: Lake
    ledger: Ledger
    policy: Policy
    optimizer: MasterAdamW
    initial: Path
    at: int | None = None
    origin: str = ""
    exact: bool = False

    def run(self, plan: Sequence[dict[str, int]], report: Callable[[dict[str, Any]], None]) -> None:
        for item in plan:
            report(self._outcome(item["batch"], item["start"]))
            log.info("batch %d is replayed", item["batch"])

    def _outcome(self, number: int, start: int) -> dict[str, Any]:
        try:
            # A difference is not carried into the next batch where that has a start of its own.
            if self.at != number - 1 or (start == number - 1 and not self.exact):
                self._go_to(start)
            assert self.at is not None
            if (first := self.at + 1) < number:
                for between in range(first, number):
                    self._train_again(between)
                on_the_way = f"batch {first}"
                if first < number - 1:
                    on_the_way = f"batches {first} to {number - 1}"
                self.origin += f", {on_the_way} trained again"
            return self._replay(number)
        except NotReplayed as error:
            self.at = None
            return {"fault": str(error).splitlines()[0]}

    def _go_to(self, start: int) -> None:
        """Fills masters and moments as they were after batch `start`, and sees that they are."""
        self.at = None
        for parameter in self.policy.parameters.values():
            parameter.grad = None
        entry = self.ledger.last("version_published", version=0)
        place = "version 0"
        try:
            if start == 0:
                self.optimizer.load(read_anchor(self.initial).items(), str(self.initial))
            else:
                entry = self.ledger.last("batch_trained", batch=start)
                assert entry is not None and entry.checkpoint is not None
                place = f"the checkpoint of batch {start}"
                get = partial(open_store(self.config).get, entry.checkpoint, checkpoints.MANIFEST)
                assert checkpoint.load(fetched(get), self.optimizer) == start
        except ValueError as error:
            raise NotReplayed(str(error)) from error
        root = root_hash_of_stream(published(self.policy))
        assert entry is not None
        if root != entry.root_hash:
            raise NotReplayed(
                f"{place} holds root hash {root}, and the ledger has {entry.root_hash}: the store "
                "was changed."
            )
        self.at, self.origin, self.exact = start, place, True

    def _read(self, number: int) -> Recorded:
        """What is recorded of a batch; from here on computed on as many threads as it was."""
        try:
            recorded = ranks.together(
                lambda: read_recorded(self.lake, self.ledger, self.config, number, self.policy)
            )
        except Exception as error:
            # Whatever damaged rows make a reader say, they are not what was trained.
            raise NotReplayed(str(error) or type(error).__name__) from error
        threads = cpu_threads(recorded.steps[0]["hardware"]) or self.config.trainer.threads
        torch.set_num_threads(max(1, threads // dist.get_world_size()))
        return recorded

    def _train_again(self, number: int) -> None:
        """A batch on the way to one that is asked for."""
        try:
            recorded = self._read(number)
            self._train(recorded, self._correct(recorded))
        except NotReplayed as error:
            raise NotReplayed(f"batch {number}, on the way to it: {error}") from error
        self.at, self.exact = number, False

    def _score(self, recorded: Recorded) -> Scores:
        """Scores of what the policy holds, computed as the run did."""
        try:
            return score_batch(self.policy, recorded.batch, self.config, self.ledger)
        except ValueError as error:
            raise NotReplayed(str(error)) from error

    def _correct(self, recorded: Recorded) -> Correction:
        return correct(recorded.batch, recorded.scores, self.config.trainer)

    def _train(self, recorded: Recorded, correction: Correction) -> list[Row]:
        """The batch's steps, taken with the recorded scores."""
        batch, scores = recorded.batch, recorded.scores
        try:
            return train_batch(self.policy, self.optimizer, batch, scores, correction, self.config)
        except ValueError as error:
            raise NotReplayed(str(error)) from error

    def _replay(self, number: int) -> dict[str, Any]:
        recorded, origin = self._read(number), self.origin
        before = dict(self.policy.local_values())
        scores = self._score(recorded)
        batch, correction = recorded.batch, self._correct(recorded)
        rows = self._train(recorded, correction)
        table = scores_table(batch, scores, correction)
        steps = [
            {
                "step": then["step"],
                "minibatch": minibatch.number,
                "differences": [
                    *map(asdict, score_differences(batch, minibatch, recorded.score_rows, table)),
                    *map(asdict, step_differences(then, now)),
                ],
            }
            for minibatch, then, now in zip(
                minibatches(batch, self.config.batch.minibatches), recorded.steps, rows, strict=True
            )
        ]
        weights = self._compare_weights(recorded.trained, before)
        equal = weights["root_hash"] == recorded.trained.root_hash
        self.exact = ranks.agreed(lambda: (int(equal),)) == (1,)
        doubt = "" if self.exact else ", which came out otherwise"
        self.at, self.origin = number, f"the replay of batch {number}{doubt}"
        return weights | {
            "origin": origin,
            "steps": steps,
            "recorded_on": {name: recorded.steps[0][name] for name in PLACE},
            "replayed_on": {name: rows[0][name] for name in PLACE},
        }

    def _compare_weights(self, trained: Entry, before: dict[str, Tensor]) -> dict[str, Any]:
        """What rank 0 finds; every rank calls it."""
        moved = torch.zeros((), dtype=torch.float64)
        for name, value in self.policy.local_values():
            moved += (value.double() - before[name].double()).square().sum().cpu()
        dist.all_reduce(moved)
        values: dict[str, Tensor] = {}
        # Collective, so that every rank takes part; only the first keeps what it gets.
        for name, value in published(self.policy):
            if dist.get_rank() == 0:
                values[name] = value
        if dist.get_rank() != 0:
            return {"root_hash": None}
        hashes = {name: tensor_hash(value) for name, value in values.items()}
        tensors, fault = [], None
        try:
            named, read = self._recorded_weights(trained)
            if named.keys() != values.keys():
                raise ValueError("version holds other tensors than the model has.")
            if named != hashes:
                tensors = [
                    tensor_difference(name, value, values[name])
                    for name, value in read()
                    if named[name] != hashes[name]
                ]
        except ValueError as error:
            fault = str(error).splitlines()[0]
        distance = math.sqrt(sum(tensor.square for tensor in tensors))
        return {
            "fault": fault,
            "num_tensors": len(values),
            "tensors": [asdict(tensor) for tensor in tensors],
            "distance": distance,
            "update": math.sqrt(float(moved)),
            "root_hash": root_hash(values),
            "recorded_root_hash": trained.root_hash,
        }

    def _recorded_weights(
        self, trained: Entry
    ) -> tuple[dict[str, str], Callable[[], Iterator[tuple[str, Tensor]]]]:
        """Hashes of the tensors that a batch came to, and how to read these: from its publication,
        or from its checkpoint while there is none."""
        store = open_store(self.config)
        version = self.ledger.last("version_published", version=trained.batch)
        if version is not None:
            uri = version.details["uri"]
            return tensor_hashes(store, uri), lambda: find_chain(store, uri).tensors()
        assert trained.checkpoint is not None
        folder = store.get(trained.checkpoint, checkpoints.MANIFEST)
        read = partial(checkpoints.published_values, folder)
        return {name: tensor_hash(value) for name, value in read()}, read


@torch.no_grad()
def published(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """(name, whole bf16 tensor) pairs of what the parameters hold; every rank must go through."""
    yield from policy.layout.published(
        (name, parameter.full_tensor().to(torch.bfloat16).cpu())
        for name, parameter in policy.parameters.items()
    )


def open_replay(arguments: argparse.Namespace) -> Replay:
    lake = Lake.open(arguments.lake)
    ledger = lake.ledger(arguments.run_id)
    recorded = parse_recorded_config(ledger.entries[0].details["config"], "the ledger")
    config = elsewhere(recorded, store=arguments.store, cache=arguments.cache)
    device = ranks.start(arguments.threads)
    initial = publication(config, ledger, 0)
    policy, optimizer = make_trainer(config, initial, device)
    return Replay(config, lake, ledger, policy, optimizer, initial)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="trainers.replay_job", description=__doc__)
    for name in ("lake", "run-id", "store", "cache"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("plan", "report"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    ranks.die_with_controller()

    def report(outcome: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            with arguments.report.open("a") as file:
                file.write(json.dumps(outcome) + "\n")

    try:
        open_replay(arguments).run(json.loads(arguments.plan.read_text()), report)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
