"""What a person sees while a run works and when it is done; machines use `--json`."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

SIGNAL_HEADERS = {
    "max_w": "max w",
    "mean_lag_steps": "lag",
    "stall_share": "stall",
    "mfu": "MFU",
    "reward_mean": "reward",
    "heldout_pass_at_1": "eval",
    "entropy_mean": "entropy",
    "gradient_norm": "grad",
}


class RunDisplay:
    """Turns the cycle's events into progress bars, or into a line a batch where there is no
    terminal."""

    def __init__(self, console: Console, batches_total: int):
        self.console = console
        self._batches_total = batches_total
        self._window_started = time.monotonic()
        self._tokens_per_s = 0.0
        self._progress = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=28),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._groups: TaskID = self._progress.add_task("groups", total=1, note="")
        self._batches: TaskID = self._progress.add_task("batches", total=batches_total, note="")

    def __enter__(self) -> "RunDisplay":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "opening":
                start = event["policy"]["path"]
                if start is None:
                    start = (
                        f"the warm-started policy in {event['policy']['warm_start']['cache']} "
                        "(made now if it is not there, which takes a minute or two)"
                    )
                self.console.print(f"version 0: {start}", soft_wrap=True)
            case "cycle":
                self.console.print(f"cycle {event['cycle']} (of {event['of']})")
            case "dispatched":
                self._window_started = time.monotonic()
                self._progress.update(self._groups, total=event["groups"], completed=0)
            case "sampling":
                self._progress.update(self._groups, completed=event["done"], total=event["of"])
            case "sampled":
                elapsed = time.monotonic() - self._window_started
                self._tokens_per_s = event["action_tokens"] / max(elapsed, 1e-9)
                self._window_started = time.monotonic()
                self._progress.update(self._groups, note=f"{self._tokens_per_s:,.0f} tok/s")
            case "trained":
                self._trained(event)
            case "evaluated":
                result = event["pass_at_1"]
                shown = "none, all in quarantine" if result is None else f"{result:.3f}"
                self.console.print(f"held-out pass@1 of version {event['version']}: {shown}")
            case "attaching" if event["engine"]["backend"] == "vllm":
                self.console.print("attaching vLLM servers (one that is started takes a minute)")
            case "engine_lost" | "engine_refused":
                self.console.print(
                    f"engine {event['engine']} is out of traffic: {event['reason']}",
                    soft_wrap=True,
                    # A log's brackets are no markup.
                    markup=False,
                )
            case "engine_returned":
                self.console.print(f"engine {event['engine']} attested and is back in traffic")
            case "data_docs" if event["refused"]:
                self.console.print(f"what the gates found: {event['path']}", soft_wrap=True)
            case "warning":
                self.console.print(
                    f"gate {event['gate']} warns: {event['warning']}", soft_wrap=True, markup=False
                )
            case "dropped":
                self.console.print(
                    f"dropped {event['trajectories']} ({event['reason']})", markup=False
                )

    def _trained(self, event: dict[str, Any]) -> None:
        steps = event["steps"]
        last = steps[-1]
        seconds = sum(s["score_s"] + s["train_s"] + s["checkpoint_s"] for s in steps)
        reward = sum(s["reward_mean"] for s in steps) / len(steps)
        self._progress.update(
            self._batches, completed=event["batch"], note=f"step {last['step']}, {seconds:.1f} s"
        )
        self.console.print(
            f"batch {event['batch']:>3}/{self._batches_total}  step {last['step']:>4}  "
            f"reward {reward:.3f}  max w {max(s['max_w'] for s in steps):.4f}  "
            f"lag {max(s['mean_lag_steps'] for s in steps):.2f}  "
            f"entropy {last['entropy_mean']:.3f}  grad {last['gradient_norm']:.3f}  "
            f"{self._tokens_per_s:,.0f} tok/s  train {seconds:.1f} s",
            soft_wrap=True,
        )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _percent(estimate: dict[str, float]) -> str:
    return f"{estimate['mean']:.1%} (95 % CI {estimate['ci_low']:.1%} to {estimate['ci_high']:.1%})"


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    """The end of a run, for people."""
    signals = summary["signals"]
    table = Table(
        title="signals by step (lag in optimizer steps, eval: held-out pass@1)",
        title_justify="left",
    )
    for header in ("step", *SIGNAL_HEADERS.values()):
        table.add_column(header, justify="right")
    shown = signals if len(signals) <= 12 else [*signals[:5], *signals[-7:]]
    previous = 0
    for row in shown:
        if row["step"] > previous + 1:
            table.add_section()
        previous = row["step"]
        table.add_row(str(row["step"]), *(_number(row[name]) for name in SIGNAL_HEADERS))
    if signals:
        console.print(table)
    before, after, gain = (summary[f"pass_at_1_{name}"] for name in ("before", "after", "gain"))
    if gain is not None:
        console.print(f"held-out pass@1, version {before['version']}: {_percent(before)}")
        console.print(f"held-out pass@1, version {after['version']}: {_percent(after)}")
        points = {name: 100 * gain[name] for name in ("mean", "ci_low", "ci_high")}
        console.print(
            f"gain, paired over {gain['num_tasks']} problems: {points['mean']:+.1f} points "
            f"(95 % CI {points['ci_low']:+.1f} to {points['ci_high']:+.1f})"
        )
    ended = ", ".join(f"{count} {name}" for name, count in summary["trajectories"].items())
    console.print(f"train trajectories: {ended or 'none'}")
    for warning in summary["warnings"]:
        console.print(
            f"warned {warning['times']} times: {warning['rule']} of gate {warning['gate']}, "
            f"last observed {_number(warning['observed'])}, allowed {warning['expected']}",
            soft_wrap=True,
        )
    spent = ", ".join(f"{name} {value:.1f}" for name, value in summary["seconds"].items())
    console.print(f"seconds: {spent}")
    lake = summary["lake"]
    console.print(f"what the gates found: {summary['data_docs']}", soft_wrap=True, highlight=False)
    console.print("\nWhere to look next:", style="bold")
    for line in (
        f'rollhouse sql --lake {lake} "SELECT step, w_max, kl_k3, ess_frac FROM mismatch_by_step"',
        f"rollhouse trajectory --lake {lake}",
        f"rollhouse weights list --lake {lake}",
        "rollhouse views",
    ):
        console.print(f"  {line}", soft_wrap=True, highlight=False)
