"""One cycle: sample, judge, admit, score, judge, train, publish, evaluate.

The cycle is a loop over one question, what does the ledger say comes next?, so starting, resuming
after a crash, synchronous (k = 0) and asynchronous (k >= 1) are the same code. Sampling runs in the
event loop beside it; the trainer is another process, reached through the lake alone.
"""

import asyncio
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

from flows.attachment import serve
from flows.commits import (
    Phases,
    admit_batch,
    commit_trained,
    drop_groups,
    group_members,
    judge_batch,
    publish_trained,
)
from flows.evaluation import evaluate
from flows.opening import OpenRun, Report, holding_lease
from flows.refusals import refuse_window
from flows.windows import commit_window, gate1_limits
from tasks.admit import may_start, select_groups
from tasks.lake.lease import renew_if_due
from tasks.lake.ledger import Entry
from tasks.progress import Progress, read_progress, unpublished_batch
from tasks.record import Window, quarantine_rows
from tasks.rollout import Rollout, RolloutContext, sample_group
from tasks.seeds import derive_seed
from tasks.train import TrainerJob, written_under_lease
from tasks.validate import Judgement

POLL_S = 0.05


@dataclass
class Cycle:
    """`run` stands at this cycle; `context` holds its attached engine."""

    run: OpenRun
    context: RolloutContext
    phases: Phases = field(default_factory=Phases)
    report: Report = lambda event: None
    seconds: dict[str, float] = field(default_factory=dict)
    in_flight: dict[int, asyncio.Task[list[Rollout]]] = field(default_factory=dict)
    _progress: tuple[int, Progress] | None = None
    _last_advance: float = 0.0

    @property
    def until_batch(self) -> int:
        return (self.run.cycle + 1) * self.run.config.run.batches_per_cycle

    @property
    def colocated(self) -> bool:
        """Whether engines leave their devices to the trainer while it works."""
        vllm = self.run.config.engine.vllm
        return vllm is not None and vllm.colocated

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
        if run.ledger.last("cycle_opened", cycle=run.cycle) is None:
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
            pass_at_1 = await holding_lease(
                self.run, evaluate(self.run, self.context, version, self.phases.record)
            )
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
        self._last_advance = time.monotonic()
        try:
            while (progress := self.progress()).batches_trained < self.until_batch:
                if self.dispatch(progress) or self.collect() or await self.admit(progress):
                    continue
                if progress.open_admission is not None and await self.advance(progress, trainer):
                    continue
                renew_if_due(self.run.ledger, self.run.lease)
                await self.wait()
            with self.timed("sample"):
                await holding_lease(self.run, self.drain())
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
        Raises `BatchRefused` if gate 1 refuses the window.
        """
        finished = {group: task for group, task in self.in_flight.items() if task.done()}
        idle = len(finished) == len(self.in_flight)
        enough = len(finished) >= self.run.config.batch.num_groups or idle or everything
        if not finished or not enough:
            return False
        rollouts = [rollout for task in finished.values() for rollout in task.result()]
        for group in finished:
            del self.in_flight[group]
        num_actions = sum(r.trajectory["num_action_tokens"] for r in rollouts)
        self.report({"event": "sampled", "action_tokens": num_actions})
        limits, scope = gate1_limits(self.run, self.context), f"window of {len(finished)} groups"
        with self.timed("record"):
            recorded = self.phases.record(
                self.run.lake,
                Window.of(rollouts),
                limits,
                run_id=self.run.run_id,
                cycle=self.run.cycle,
                lease=self.run.lease,
                scope=scope,
            )
            if not recorded.judgement.ok:
                batch = self.progress().batches_trained + 1
                raise refuse_window(self.run, recorded, limits, scope, batch=batch)
            commit_window(self.run, recorded)
        self.warn(recorded.judgement)
        if recorded.num_quarantined:
            self.report(
                {
                    "event": "dropped",
                    "trajectories": recorded.num_quarantined,
                    "reason": "gate 1 or a failure; see the quarantine table",
                }
            )
        return True

    def warn(self, judgement: Judgement) -> None:
        for warning in judgement.warnings:
            self.report({"event": "warning", "gate": judgement.gate, "warning": warning})

    async def drain(self) -> None:
        """Lets rollouts in flight end and records them: the next cycle may train them."""
        while self.in_flight:
            await asyncio.wait(self.in_flight.values())
            self.collect(everything=True)

    async def admit(self, progress: Progress) -> bool:
        """Admits the next batch if enough whole groups wait and none is open."""
        if progress.open_admission is not None:
            return False
        config = self.run.config
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
            reason = f"older than max_lag when batch {batch} was chosen"
            num_dropped = drop_groups(self.run, selection.stale, "stale", reason)
            self.report({"event": "dropped", "trajectories": num_dropped, "reason": "stale"})
        if selection.admitted is None:
            return bool(selection.stale)
        with self.timed("admit"):
            admit_batch(self.run, self.phases, batch, selection.admitted)
            if self.colocated:
                assert not self.in_flight, "with k = 0 nothing is sampled while the trainer works"
                await holding_lease(self.run, self.context.engine.pause())
        self._last_advance = time.monotonic()
        return True

    async def advance(self, progress: Progress, trainer: TrainerJob) -> bool:
        """Takes what the trainer has written since: scores to gate 2, or steps to the ledger."""
        admitted = progress.open_admission
        assert admitted is not None
        # Asked before the rows are read: a job may write its last ones and end.
        ended = trainer.process.poll()
        rows = written_under_lease(
            self.run.lake,
            "steps" if progress.accepted else "scores",
            self.run.run_id,
            self.run.lease,
            "admission",
            admitted.seq,
        )
        if rows.num_rows == 0:
            waited_s = time.monotonic() - self._last_advance
            trainer.check_alive(ended, waited_s, self.run.config.trainer.timeout_s)
            return False
        self._last_advance = time.monotonic()
        if not progress.accepted:
            with self.timed("judge"):
                self.warn(judge_batch(self.run, self.phases, admitted, rows))
            return True
        trained = commit_trained(self.run, admitted, rows)
        self.report({"event": "trained", "batch": admitted.batch, "steps": rows.to_pylist()})
        await self.publish(trained)
        return True

    async def publish(self, trained: Entry) -> None:
        with self.timed("publish"):
            version = publish_trained(self.run, self.phases, trained)
            if self.colocated:
                await holding_lease(self.run, self.context.engine.resume())
            await holding_lease(self.run, serve(self.run, self.context.engine, version))

    def close(self) -> None:
        """Commits `cycle_closed`; the run's last cycle drops what no batch will train."""
        run, progress = self.run, self.progress()
        write_ids: tuple[str, ...] = ()
        ends_run = run.cycle + 1 >= run.config.run.num_cycles
        if ends_run and progress.finished:
            surplus = group_members(run, [group.group_id for group in progress.finished])
            rows = quarantine_rows(
                surplus, rule="surplus", action="drop", reason="the run ended before its batch"
            )
            write_ids = (run.append("quarantine", rows),)
        run.commit(
            "cycle_closed",
            version=progress.batches_trained,
            write_ids=write_ids,
            details={
                "seconds": {phase: round(s, 3) for phase, s in self.seconds.items()},
                "ends_run": ends_run,
            },
        )
