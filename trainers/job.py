"""The trainer job of one cycle: admitted batches in, scores, checkpoints and steps out.

    python -m torch.distributed.run --standalone --nproc-per-node R -m trainers.job \\
        --lake URI --run-id ID --cycle N --lease L --until-batch B --threads T

The lake is its only channel: it follows the ledger, which it never writes, and its standard input
must be a pipe of the controller, whose end ends the job. It runs from the last trained checkpoint
to batch B or the cycle's close. No backward pass starts before the batch's `batch_accepted` row,
and the `steps` rows that tell the controller a batch is trained come after its checkpoint is
durable. Given the same checkpoint, batch, ranks and threads it produces the same bits.

Exit codes of a rank: 0 done, 1 failed, 3 the controller is gone, 4 another lease was taken.
"""

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import torch
import torch.distributed as dist

from schemas.config import RunConfig, parse_recorded_config
from tasks.lake import Entry, Lake, Ledger
from tasks.weights import checkpoints
from tasks.weights.anchors import read_anchor
from tasks.weights.store import open_store
from tasks.weights.versions import version_folder
from trainers import checkpoint, ranks
from trainers.following import Follower
from trainers.optimizer import AdamWSettings, MasterAdamW
from trainers.policy import Policy
from trainers.scoring import Scores, correct, score, scores_from_table, scores_table
from trainers.sequences import TrainingBatch, read_training_batch
from trainers.steps import finished_rows, train_batch

log = logging.getLogger(__name__)


@dataclass
class Job:
    """One rank's part in the training of one run during one cycle."""

    config: RunConfig
    lake: Lake
    follower: Follower
    policy: Policy
    optimizer: MasterAdamW

    def run(self, batch: int, until_batch: int) -> None:
        """Trains batches from `batch` on; returns at `until_batch` or when the cycle is closed."""
        while batch <= until_batch:
            waited = time.monotonic()
            found = self.follower.next_admission(batch)
            if found is None:
                log.info("cycle %d is closed", self.follower.cycle)
                return
            admission, accepted = found
            if self._train(admission, accepted, stall_s=time.monotonic() - waited):
                batch += 1

    def _train(self, admission: int, accepted: Entry | None, stall_s: float) -> bool:
        """Scores an admission, waits for gate 2 and trains it; False if it was not accepted."""
        batch = read_training_batch(
            self.lake, self.config.run.run_id, admission, self.policy.routed_layers
        )
        score_s = 0.0
        if accepted:
            scores = scores_from_table(
                batch,
                read_scores(self.lake, self.config.run.run_id, batch.admission, accepted),
            )
        else:
            started = time.monotonic()
            scores = self._score(batch)
            score_s = time.monotonic() - started
            if not self.follower.is_accepted(batch.batch, admission):
                log.warning("batch %d (admission %d) was not accepted", batch.batch, admission)
                return False
            stall_s += time.monotonic() - started - score_s
        trainer = self.config.trainer
        correction = correct(batch, scores, trainer)
        rows = train_batch(self.policy, self.optimizer, batch, scores, correction, self.config)
        rows[0] |= {"stall_s": stall_s, "score_s": score_s}
        started = time.monotonic()
        path = checkpoint.relative_path(batch.batch, self.follower.lease)
        store = open_store(self.config)
        checkpoint.save(store.folder / path, self.optimizer, batch.batch)
        if dist.get_rank() == 0:
            store.put(path, checkpoints.MANIFEST)
            self._append("steps", finished_rows(rows, store.folder, path, started))
            log.info("batch %d is trained; checkpoint %s", batch.batch, path)
        return True

    def _score(self, batch: TrainingBatch) -> Scores:
        scores = score_batch(self.policy, batch, self.config, self.follower.ledger)
        if dist.get_rank() == 0:
            correction = correct(batch, scores, self.config.trainer)
            self._append("scores", scores_table(batch, scores, correction))
        return scores

    def _append(self, table: str, rows: pa.Table) -> None:
        self.lake.append(
            table,
            rows,
            run_id=self.config.run.run_id,
            cycle=self.follower.cycle,
            lease=self.follower.lease,
        )


def fetched(fetch: Callable[[], Path]) -> Path:
    """A folder of the store on this machine. Called by every rank: the first one brings it.

    Raises on every rank what `fetch` raises on the first.
    """
    ranks.together(lambda: fetch() if dist.get_rank() == 0 else None)
    return fetch()


def publication(config: RunConfig, ledger: Ledger, version: int) -> Path:
    """The Hugging Face folder of a published version.

    Raises `ValueError` where the ledger names none, or the store does not hold it whole.
    """
    entry = ledger.last("version_published", version=version)
    if entry is None:
        raise ValueError(
            f"the ledger of run {config.run.run_id} has no published version {version}; run the "
            "cycle again, which publishes it from its checkpoint."
        )
    return fetched(partial(version_folder, open_store(config), entry.details["uri"]))


def score_batch(policy: Policy, batch: TrainingBatch, config: RunConfig, ledger: Ledger) -> Scores:
    """The batch scored by what `policy` holds, as the run has it."""
    trainer = config.trainer
    return score(
        policy,
        batch,
        token_budget=trainer.token_budget,
        audit_fraction=trainer.audit_fraction,
        seed=config.run.seed,
        reference_version=trainer.reference_version,
        read_version=lambda version: read_anchor(publication(config, ledger, version)).items(),
    )


def read_scores(lake: Lake, run_id: str, admission: int, accepted: Entry) -> pa.Table:
    """The rows of `scores` that gate 2 accepted."""
    return lake.read(
        "scores",
        run_id=run_id,
        where="admission = ?",
        params=[admission],
        write_ids=accepted.write_ids,
    )


def make_trainer(
    config: RunConfig, initial: Path, device: torch.device
) -> tuple[Policy, MasterAdamW]:
    """The model of version 0's folder and its optimizer, values not loaded."""
    trainer = config.trainer
    policy = Policy(
        initial,
        getattr(torch, trainer.compute_dtype),
        device,
        routing_replay=trainer.routing_replay,
        activation_checkpointing=trainer.activation_checkpointing,
    )
    settings = AdamWSettings(
        beta1=trainer.beta1,
        beta2=trainer.beta2,
        epsilon=trainer.epsilon,
        weight_decay=trainer.weight_decay,
        max_gradient_norm=trainer.max_gradient_norm,
    )
    return policy, MasterAdamW(policy, settings)


def open_job(arguments: argparse.Namespace) -> tuple[Job, int]:
    """The job at the last trained batch, and that batch's number (0 before one)."""
    lake = Lake.open(arguments.lake)
    ledger = lake.ledger(arguments.run_id)
    created = ledger.last("run_created")
    if created is None:
        raise ValueError(
            f"{arguments.lake} has no run {arguments.run_id}; `rollhouse run RUN.toml` opens one."
        )
    config = parse_recorded_config(created.details["config"], "the ledger")
    device = ranks.start(arguments.threads)
    initial = publication(config, ledger, 0)
    policy, optimizer = make_trainer(config, initial, device)
    trained = ledger.last("batch_trained")
    batch = 0
    if trained is None:
        optimizer.load(read_anchor(initial).items(), str(initial))
    else:
        assert trained.checkpoint is not None
        store = open_store(config)
        folder = fetched(partial(store.get, trained.checkpoint, checkpoints.MANIFEST))
        batch = checkpoint.load(folder, optimizer)
        assert batch == trained.batch, f"{trained.checkpoint} holds batch {batch}"
    follower = Follower(ledger, arguments.cycle, arguments.lease)
    return Job(config, lake, follower, policy, optimizer), batch


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="trainers.job", description=__doc__)
    for name in ("lake", "run-id"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("cycle", "lease", "until-batch", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    ranks.die_with_controller()
    try:
        job, batch = open_job(arguments)
        log.info("batch %d is the last trained; going to batch %d", batch, arguments.until_batch)
        job.run(batch + 1, arguments.until_batch)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
