"""One cycle: sample, judge, admit, score, judge, train, publish, evaluate.

The cycle is a loop over one question, what does the ledger say comes next?, so starting, resuming
after a crash, synchronous (k = 0) and asynchronous (k >= 1) are the same code. Sampling runs in the
event loop beside it; the trainer is another process, reached through the lake alone.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flows.evaluation import evaluate
from flows.opening import OpenRun, serve
from flows.windows import commit_window, gate1_limits
from tasks.admit import may_start, select_groups
from tasks.lake.batches import read_batch, trajectories_hash, write_batch
from tasks.lake.lease import renew_if_due
from tasks.lake.ledger import Entry
from tasks.progress import Progress, read_progress, unpublished_batch
from tasks.publish import publication_row, publish_version, relative_uri
from tasks.record import Window, quarantine_rows, record_rollouts
from tasks.rollout import Rollout, RolloutContext, sample_group
from tasks.seeds import derive_seed
from tasks.train import TrainerJob, judge_scores, write_ids_of, written_under_lease

POLL_S = 0.05


class BatchRefused(RuntimeError):
    """A gate refused what would have been trained. Nothing was trained on it."""


@dataclass(frozen=True)
class Phases:
    """The cycle's heavy steps, as plain functions; Prefect hands in the same ones as tasks."""

    record: Callable[..., Any] = record_rollouts
    admit: Callable[..., Any] = write_batch
    judge: Callable[..., Any] = judge_scores
    publish: Callable[..., Any] = publish_version


@dataclass
class Cycle:
    run: OpenRun
    context: RolloutContext
    phases: Phases = Phases()
    report: Callable[[dict[str, Any]], None] = lambda event: None
    seconds: dict[str, float] = field(default_factory=dict)
    in_flight: dict[int, asyncio.Task[list[Rollout]]] = field(default_factory=dict)
    _progress: tuple[int, Progress] | None = None

    @property
    def until_batch(self) -> int:
        return (self.run.cycle + 1) * self.run.config.run.batches_per_cycle

    @contextmanager
    def timed(self, phase: str):
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - start

    async def execute(self) -> None:
        """Runs the cycle to its `cycle_closed`, from wherever the ledger says it stands.

        Raises `BatchRefused`, `TrainerFailed`, `EngineRefused` or `LeaseLost`; what was committed
        by then stays, and executing the cycle again goes on from there.
        """
        run = self.run
        opened = run.ledger.last("cycle_opened", cycle=run.cycle)
        if opened is None:
            run.commit("cycle_opened")
        if (trained := unpublished_batch(run.ledger)) is not None:
            await self.publish(trained)
        if run.ledger.last("evaluated", version=0) is None:
            await self.evaluate(0)
        if self.progress().batches_trained < self.until_batch:
            await self.train_batches()
        version = self.progress().batches_trained
        if run.ledger.last("evaluated", version=version) is None:
            await self.evaluate(version)
        self.close()

    def progress(self) -> Progress:
        """Where the run stands. It follows from the ledger, so it is read anew when that grew."""
        num_entries = len(self.run.ledger.entries)
        if self._progress is None or self._progress[0] != num_entries:
            self._progress = (num_entries, read_progress(self.run.lake, self.run.run_id))
        return self._progress[1]

    async def evaluate(self, version: int) -> None:
        with self.timed("evaluate"):
            pass_at_1 = await evaluate(self.run, self.context, version, self.phases.record)
        self.report({"event": "evaluated", "version": version, "pass_at_1": pass_at_1})

    async def train_batches(self) -> None:
        config = self.run.config
        trainer = TrainerJob.start(
            config,
            self.run.lake,
            cycle=self.run.cycle,
            lease=self.run.lease,
            until_batch=self.until_batch,
        )
        try:
            while (progress := self.progress()).batches_trained < self.until_batch:
                if self.dispatch(progress) or self.collect() or self.admit(progress):
                    continue
                if progress.open_admission is not None and await self.advance(progress, trainer):
                    continue
                renew_if_due(self.run.ledger, self.run.lease)
                await self.wait()
            with self.timed("sample"):
                await self.drain()
        finally:
            for task in self.in_flight.values():
                task.cancel()
            self.in_flight.clear()
            trainer.stop(timeout_s=30.0)

    async def wait(self) -> None:
        """Lets sampling go on until a group ends or it is time to look at the lake again."""
        sampling = [task for task in self.in_flight.values() if not task.done()]
        of = len(self.in_flight)
        self.report({"event": "sampling", "done": of - len(sampling), "of": of})
        with self.timed("sample" if sampling else "wait_for_trainer"):
            if sampling:
                await asyncio.wait(sampling, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(POLL_S)

    def dispatch(self, progress: Progress) -> bool:
        """Starts as many groups as admission control allows."""
        config = self.run.config
        size = config.batch.group_size
        numbers = progress.next_groups(self.in_flight)
        started = False
        while may_start(
            num_started=progress.num_recorded + len(self.in_flight) * size,
            num_dropped=progress.num_dropped,
            batches_trained=progress.batches_trained,
            k=config.asynchrony.k,
            batch_trajectories=config.batch.trajectories,
            last_batch=config.run.num_cycles * config.run.batches_per_cycle,
        ):
            group = numbers.take()
            task = self.context.environment.sample(derive_seed(config.run.seed, "task", group))
            self.in_flight[group] = asyncio.create_task(
                sample_group(self.context, task, config.sampling, group, size)
            )
            started = True
        if started:
            self.report({"event": "dispatched", "groups": len(self.in_flight)})
        return started

    def collect(self, *, everything: bool = False) -> bool:
        """Records finished groups once they fill a batch, or once nothing else is running.

        With k = 0 that is the whole window, so that a resume samples the same composition again.
        """
        finished = {group: task for group, task in self.in_flight.items() if task.done()}
        idle = len(finished) == len(self.in_flight)
        enough = len(finished) >= self.run.config.batch.num_groups or idle or everything
        if not finished or not enough:
            return False
        rollouts = [rollout for task in finished.values() for rollout in task.result()]
        self.report(
            {
                "event": "sampled",
                "action_tokens": sum(r.trajectory["num_action_tokens"] for r in rollouts),
            }
        )
        for group in finished:
            del self.in_flight[group]
        with self.timed("record"):
            recorded = self.phases.record(
                self.run.lake,
                Window.of(rollouts),
                gate1_limits(self.run, self.context),
                run_id=self.run.run_id,
                cycle=self.run.cycle,
                lease=self.run.lease,
                scope=f"window of {len(finished)} groups",
            )
            if not recorded.judgement.ok:
                self.refuse_window(recorded)
            commit_window(self.run, recorded)
        rewards = [r.trajectory["reward"] for r in rollouts if r.trajectory["reward"] is not None]
        self.report(
            {
                "event": "recorded",
                "trajectories": len(rollouts),
                "quarantined": recorded.num_quarantined,
                "reward_mean": sum(rewards) / max(len(rewards), 1),
            }
        )
        return True

    def refuse_window(self, recorded: Any) -> None:
        batch = self.progress().batches_trained + 1
        self.run.commit(
            "batch_refused",
            batch=batch,
            write_ids=recorded.write_ids,
            num_trajectories=len(recorded.trajectory_ids),
            trajectories_hash=trajectories_hash(recorded.trajectory_ids),
            details={"admission": None, "gate": 1, "reason": recorded.judgement.reason},
        )
        raise BatchRefused(
            f"Gate 1 refused {len(recorded.trajectory_ids)} trajectories meant for batch {batch}: "
            f"{recorded.judgement.reason}. Nothing was trained on them; mend the cause and run "
            "again to sample them anew."
        )

    async def drain(self) -> None:
        """Lets rollouts in flight end and records them: the next cycle may train them."""
        while self.in_flight:
            await asyncio.wait(self.in_flight.values())
            self.collect(everything=True)

    def admit(self, progress: Progress) -> bool:
        """Freezes the next batch if enough whole groups wait and none is open."""
        if progress.open_admission is not None:
            return False
        run, config = self.run, self.run.config
        batch = progress.batches_trained + 1
        selection = select_groups(
            progress.finished,
            self.in_flight,
            batch=batch,
            num_groups=config.batch.num_groups,
            max_lag=config.asynchrony.lag_bound,
            order=config.asynchrony.order,
        )
        if selection.stale:
            self.drop(selection.stale, "stale", f"older than max_lag when batch {batch} was chosen")
        if selection.admitted is None:
            return bool(selection.stale)
        ids = [row["trajectory_id"] for row in self.members(selection.admitted)]
        admission = len(run.ledger.entries)
        with self.timed("admit"):
            write_id = self.phases.admit(
                run.lake,
                run_id=run.run_id,
                cycle=run.cycle,
                lease=run.lease,
                admission=admission,
                batch=batch,
                trajectory_ids=ids,
            )
            entry = run.commit(
                "batch_admitted",
                batch=batch,
                write_ids=(write_id,),
                num_trajectories=len(ids),
                trajectories_hash=trajectories_hash(ids),
            )
        assert entry.seq == admission, "only the lease holder appends"
        return True

    def members(self, groups: tuple[int, ...]) -> list[dict[str, Any]]:
        """Trajectory and group ids of whole groups, in (group_id, sample_index) order."""
        rows = self.run.lake.read(
            "trajectories",
            run_id=self.run.run_id,
            columns=["trajectory_id", "group_id"],
            where="list_contains(?, group_id)",
            params=[list(groups)],
            order_by="group_id, sample_index",
        )
        return rows.to_pylist()

    def drop(self, groups: tuple[int, ...], rule: str, reason: str) -> None:
        rows = quarantine_rows(self.members(groups), rule=rule, action="drop", reason=reason)
        self.run.commit(
            "rollouts_recorded",
            write_ids=(self.run.append("quarantine", rows),),
            num_trajectories=0,
            details={"dropped": len(rows), "rule": rule},
        )
        self.report({"event": "dropped", "trajectories": len(rows), "reason": rule})

    async def advance(self, progress: Progress, trainer: TrainerJob) -> bool:
        """Takes what the trainer has written since: scores to gate 2, or steps to the ledger."""
        admitted = progress.open_admission
        assert admitted is not None and admitted.batch is not None
        table = "steps" if progress.accepted else "scores"
        rows = written_under_lease(
            self.run.lake, table, self.run.run_id, self.run.lease, "admission", admitted.seq
        )
        if rows.num_rows == 0:
            trainer.check_alive()
            return False
        if progress.accepted:
            await self.commit_trained(admitted, rows)
        else:
            self.judge_batch(admitted, rows)
        return True

    def judge_batch(self, admitted: Entry, scores: pa.Table) -> None:
        run = self.run
        with self.timed("judge"):
            batch = read_batch(run.lake, run.run_id, admitted.seq)
            judgement = self.phases.judge(
                batch.segments, scores, run.config, batch=batch.batch, admission=admitted.seq
            )
        write_ids = (
            *write_ids_of(scores),
            run.append("validations", judgement.validations()),
        )
        if judgement.ok:
            run.commit(
                "batch_accepted",
                batch=admitted.batch,
                write_ids=write_ids,
                num_trajectories=admitted.num_trajectories,
                trajectories_hash=admitted.trajectories_hash,
                details={"admission": admitted.seq},
            )
            return
        refused = quarantine_rows(
            batch.trajectories.select(["trajectory_id", "group_id"]).to_pylist(),
            rule="refused",
            action="refuse",
            reason=judgement.reason,
        )
        run.commit(
            "batch_refused",
            batch=admitted.batch,
            write_ids=(*write_ids, run.append("quarantine", refused)),
            num_trajectories=admitted.num_trajectories,
            trajectories_hash=admitted.trajectories_hash,
            details={"admission": admitted.seq, "gate": 2, "reason": judgement.reason},
        )
        first, last = refused[0]["trajectory_id"], refused[-1]["trajectory_id"]
        raise BatchRefused(
            f"Gate 2 refused batch {admitted.batch} ({len(refused)} trajectories, {first} to "
            f"{last}): {judgement.reason}. Nothing was trained on it; mend the cause and run again "
            "to sample other groups."
        )

    async def commit_trained(self, admitted: Entry, steps: pa.Table) -> None:
        last = steps.filter(pc.field("checkpoint").is_valid()).to_pylist()[0]
        trained = self.run.commit(
            "batch_trained",
            batch=admitted.batch,
            write_ids=tuple(write_ids_of(steps)),
            num_trajectories=admitted.num_trajectories,
            trajectories_hash=admitted.trajectories_hash,
            checkpoint=last["checkpoint"],
            root_hash=last["root_hash"],
            details={"admission": admitted.seq},
        )
        self.report({"event": "trained", "batch": admitted.batch, "steps": steps.to_pylist()})
        await self.publish(trained)

    async def publish(self, trained: Entry) -> None:
        run = self.run
        with self.timed("publish"):
            publication = self.phases.publish(run.config, run.ledger, trained, run.lease)
            run.commit(
                "version_published",
                batch=trained.batch,
                version=trained.batch,
                root_hash=publication.root_hash,
                write_ids=(run.append("publications", [publication_row(run.config, publication)]),),
                details={"uri": relative_uri(run.config, publication)},
            )
            await serve(run, self.context.engine, publication.version)

    def close(self) -> None:
        run, progress = self.run, self.progress()
        write_ids: tuple[str, ...] = ()
        is_last = run.cycle + 1 >= run.config.run.num_cycles
        if is_last and progress.finished:
            surplus = self.members(tuple(g.group_id for g in progress.finished))
            rows = quarantine_rows(
                surplus, rule="surplus", action="drop", reason="the run ended before its batch"
            )
            write_ids = (run.append("quarantine", rows),)
        run.commit(
            "cycle_closed",
            version=progress.batches_trained,
            write_ids=write_ids,
            details={"seconds": {phase: round(s, 3) for phase, s in self.seconds.items()}},
        )
        self.report({"event": "cycle_closed", "cycle": run.cycle})
