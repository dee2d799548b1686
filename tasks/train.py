"""Launch the trainer job and read what it hands back through the lake.

The job is a `torchrun` of `trainers.job`. It shares nothing with the controller but the lake and
its standard input, whose end tells it that the controller is gone.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from schemas.config import RunConfig
from tasks.lake.batches import Batch
from tasks.lake.lake import Lake
from tasks.profile import Limits, profile_scores
from tasks.validate import NO_WAIVERS, History, Judgement, Waivers, judge
from tasks.weights.store import open_store


class TrainerFailed(RuntimeError):
    """The trainer job ended before its work was done."""


def torchrun(
    module: str, arguments: Mapping[str, object], *, ranks: int, threads: int, log: Path
) -> subprocess.Popen[bytes]:
    """Starts `python -m module` under torchrun on this machine, with a pipe for its input.

    `arguments` are options and their values; `threads` are shared by the ranks; output goes to
    `log`.
    """
    environment = os.environ | {
        # OpenMP's barriers spin by default, and spin against each other where processes share
        # cores: ten times slower for small models.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(max(1, threads // ranks)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), "-m", module),
        *(str(part) for option in arguments.items() for part in option),
    ]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment
        )


def log_end(log: Path) -> str:
    """The last lines of a job's log, where its error stands."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])


@dataclass
class TrainerJob:
    """One trainer job, alive for a whole cycle."""

    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(
        cls, config: RunConfig, lake: Lake, *, cycle: int, lease: int, until_batch: int
    ) -> "TrainerJob":
        run_id = config.run.run_id
        log = open_store(config).folder / "logs" / f"trainer-{cycle:06d}-{lease:06d}.log"
        arguments = {
            "--lake": lake.uri,
            "--run-id": run_id,
            "--cycle": cycle,
            "--lease": lease,
            "--until-batch": until_batch,
            "--threads": config.trainer.threads,
        }
        process = torchrun(
            "trainers.job",
            arguments,
            ranks=config.trainer.ranks,
            threads=config.trainer.threads,
            log=log,
        )
        return cls(process, log)

    def check_alive(self, code: int | None, waited_s: float, timeout_s: float) -> None:
        """Raises `TrainerFailed` with the end of the log if the job has ended with `code`, or has
        written nothing for `timeout_s` seconds."""
        if code is None and waited_s > timeout_s:
            raise TrainerFailed(
                f"The trainer job has written nothing for {waited_s:.0f} s; its log is {self.log}. "
                "Raise trainer.timeout_s if its batches take that long, and run again to resume."
            )
        if code is not None:
            raise TrainerFailed(
                f"The trainer job ended with code {code} before the batch was trained; its log is "
                f"{self.log}. Run the same command again to resume. The log ends:\n"
                f"{log_end(self.log)}"
            )

    def stop(self, timeout_s: float) -> None:
        """Ends the job by closing its standard input, by force after `timeout_s` seconds."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()


def written_under_lease(
    lake: Lake, table: str, run_id: str, lease: int, where: str, value: int
) -> pa.Table:
    """Rows that the trainer wrote under this lease, which the ledger does not name yet.

    Rows of an older lease are left out: nothing that a zombie writes counts. A job writes a batch's
    rows in one append; should it have been started twice, the newest append is taken.
    """
    rows = lake.read(
        table,
        run_id=run_id,
        where=f"{where} = ? AND starts_with(write_id, ?)",
        params=[value, f"{lease:06d}-"],
        write_ids="all",
        predicate=f"{where} = {value}",
    )
    if rows.num_rows == 0:
        return rows
    return rows.filter(pc.field("write_id") == max(rows.column("write_id").to_pylist()))


def write_ids_of(rows: pa.Table) -> list[str]:
    return sorted(set(rows.column("write_id").to_pylist()))


def judge_scores(
    batch: Batch,
    scores: pa.Table,
    config: RunConfig,
    history: History,
    waivers: Waivers = NO_WAIVERS,
) -> Judgement:
    """Gate 2 over a batch as admitted, with `scores` as the trainer wrote them; `history` holds the
    statistics of the last `gates.drift_batches` accepted batches."""
    gates = config.gates
    limits: Limits = {
        "admission": batch.admission,
        "old_version": batch.batch - 1,
        "max_lag": config.asynchrony.lag_bound,
        "logprob_tolerance": config.engine.logprob_tolerance,
        "off_factor": gates.off_factor,
        "max_share_off": gates.max_share_off,
        "correction": config.trainer.correction,
        "w_cap": config.trainer.w_cap,
        "mask": config.trainer.mask,
        "mask_low": config.trainer.mask_low,
        "mask_high": config.trainer.mask_high,
        "reference_version": config.trainer.reference_version,
        "drift_batches": gates.drift_batches,
        "rounding_step": 0.25 * config.engine.logprob_tolerance,
        "reward_step": 0.1 * (gates.reward_max - gates.reward_min),
    }
    actions = batch.segments.filter(pc.field("kind") == "action")
    profile = profile_scores(batch.trajectories, actions, scores, limits)
    return judge(
        2, f"admission {batch.admission}", profile, limits, history=history, waivers=waivers
    )
