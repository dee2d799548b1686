"""The demo under three seeds, and once with its rewards permuted across each batch.

    make seeds

Each run has its own lake under var/seeds/; all begin from the same warm start. Prints one line a
run:
held-out pass@1 before and after, the paired gain with its 95 % interval, and the seconds it took.
"""

import json
import subprocess
import sys
import time

RUNS = {
    "seed 17": ["run.seed=17"],
    "seed 18": ["run.seed=18"],
    "seed 19": ["run.seed=19"],
    "control": ["run.seed=17", 'trainer.reward_control="permuted"'],
}


def execute(name: str, settings: list[str]) -> dict:
    folder = f"var/seeds/{name.replace(' ', '-')}"
    sets = [f"run.lake={folder}/lake", f"run.store={folder}/store", *settings]
    started = time.monotonic()
    result = subprocess.run(
        [
            *(sys.executable, "-c", "from flows.cli import main; main()"),
            *("run", "infra/runs/demo.toml", "--json"),
            *(part for setting in sets for part in ("--set", setting)),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(result.stdout) | {"wall_s": time.monotonic() - started}


def percent(estimate: dict) -> str:
    return f"{100 * estimate['mean']:.1f} %"


def main() -> None:
    for name, settings in RUNS.items():
        found = execute(name, settings)
        gain = found["pass_at_1_gain"]
        low, high = 100 * gain["ci_low"], 100 * gain["ci_high"]
        print(
            f"{name}: {percent(found['pass_at_1_before'])} -> {percent(found['pass_at_1_after'])}, "
            f"gain {100 * gain['mean']:+.1f} points (95 % CI {low:+.1f} to {high:+.1f}) over "
            f"{gain['num_tasks']} held-out problems, {found['steps']} steps, "
            f"{found['wall_s']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
