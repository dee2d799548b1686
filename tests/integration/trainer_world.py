"""A small run in a real lake, as a controller leaves it for the trainer job.

A tiny Qwen3 is sampled honestly: two turns with an observation between them, at temperature 0.8,
log-probabilities from the distribution that was drawn from. `World` then plays the controller.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import torch
from transformers import AutoModelForCausalLM

from schemas.config import RunConfig
from schemas.tables import TABLES
from tasks.lake import Lake, take_lease, trajectories_hash, write_batch
from tasks.weights.importing import import_anchor
from tests.tiny_policy import write_policy

ROOT = Path(__file__).parents[2]
RUN_ID = "tiny"
TEMPERATURE = 0.8
PROMPT, FIRST, OBSERVATION, SECOND = 4, 5, 2, 3
"""Tokens of each segment of a trajectory."""


@torch.no_grad()
def _act(model, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Extends [B, S] by `count` sampled tokens; also their log-probabilities [B, count]."""
    logprobs = []
    for _ in range(count):
        logits = model(input_ids=tokens, use_cache=False).logits[:, -1].float() / TEMPERATURE
        log_softmax = logits.log_softmax(-1)
        chosen = torch.multinomial(log_softmax.exp(), 1)
        logprobs.append(log_softmax.gather(1, chosen))
        tokens = torch.cat([tokens, chosen], 1)
    return tokens, torch.cat(logprobs, 1)


def sample(folder: Path, group_size: int, groups: range, version: int, seed: int):
    """(trajectories, segments) of `groups` sampled from the weights in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    prompts = torch.randint(0, 32, (len(groups), PROMPT)).repeat_interleave(group_size, 0)
    tokens, first = _act(model, prompts, FIRST)
    seen = torch.randint(0, 32, (len(tokens), OBSERVATION))
    tokens, second = _act(model, torch.cat([tokens, seen], 1), SECOND)
    trajectories, segments = [], []
    for row, ids in enumerate(tokens.tolist()):
        group, index = groups[row // group_size], row % group_size
        name = f"{group:08d}-{index:03d}-0"
        trajectories.append(_trajectory(name, group, index, ids, version))
        start = 0
        for number, (kind, length, logprobs) in enumerate(
            [
                ("prompt", PROMPT, None),
                ("action", FIRST, first[row].tolist()),
                ("observation", OBSERVATION, None),
                ("action", SECOND, second[row].tolist()),
            ]
        ):
            segments.append(
                {
                    "trajectory_id": name,
                    "sequence_index": 0,
                    "segment_index": number,
                    "start_position": start,
                    "turn_index": number // 2,
                    "kind": kind,
                    "weight_version": None if logprobs is None else version,
                    "kv_version_min": None if logprobs is None else version,
                    "token_ids": ids[start : start + length],
                    "rollout_logprobs": logprobs,
                }
            )
            start += length
    return (
        pa.Table.from_pylist(trajectories, TABLES["trajectories"].own_schema),
        pa.Table.from_pylist(segments, TABLES["segments"].own_schema),
    )


def _trajectory(name: str, group: int, index: int, ids: list[int], version: int) -> dict:
    now = datetime.now(UTC)
    return {
        "trajectory_id": name,
        "group_id": group,
        "sample_index": index,
        "attempt": 0,
        "task_id": f"task-{group}",
        "environment": "tiny",
        "split": "train",
        "status": "completed",
        "finish_reason": "stop",
        # Something that a policy can raise: even tokens among the last three.
        "reward": sum(token % 2 == 0 for token in ids[-SECOND:]) / SECOND,
        "num_sequences": 1,
        "num_turns": 2,
        "num_tokens": len(ids),
        "num_action_tokens": FIRST + SECOND,
        "weight_version_min": version,
        "weight_version_max": version,
        "engine_id": "engine-0",
        "engine": "test",
        "sampling": {
            "temperature": TEMPERATURE,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "max_tokens": 8,
            "seed": 0,
        },
        "logprobs_mode": "processed_logprobs",
        "renderer": "test",
        "chat_template_sha256": "0",
        "tokenizer_sha256": "0",
        "started_at": now,
        "finished_at": now,
        "messages": "[]",
    }


@dataclass
class World:
    """The controller's side of one run."""

    root: Path
    lake: Lake
    config: RunConfig
    policy: Path
    lease: int

    @classmethod
    def create(cls, root: Path, **trainer) -> "World":
        config = RunConfig.model_validate(
            {
                "run": {
                    "run_id": RUN_ID,
                    "seed": 3,
                    "lake": str(root / "lake"),
                    "store": str(root / "store"),
                    "num_cycles": 1,
                    "batches_per_cycle": 2,
                },
                "policy": {"path": str(root / "policy")},
                "environment": {"name": "tiny"},
                "engine": {"max_model_tokens": 64, "logprob_tolerance": 0.05},
                "sampling": {"temperature": TEMPERATURE, "max_tokens": 8},
                "batch": {"trajectories": 16, "group_size": 4, "minibatches": 2},
                "asynchrony": {"k": 2},
                "trainer": {
                    "learning_rate": 1e-2,
                    "token_budget": 64,
                    "threads": 1,
                    "audit_fraction": 1.0,
                    **trainer,
                },
            }
        )
        policy = write_policy(root / "policy")
        lake = Lake.create(root / "lake")
        ledger = lake.ledger(RUN_ID)
        ledger.append("run_created", lease=0, details={"config": config.model_dump(mode="json")})
        lease = take_lease(ledger)
        ledger.append("cycle_opened", lease=lease, cycle=0)
        world = cls(root, lake, config, policy, lease)
        anchor = import_anchor(policy, world.store / "weights", lease)
        ledger.append(
            "version_published",
            lease=lease,
            version=0,
            root_hash=anchor.root_hash,
            details={"uri": str(Path(anchor.uri).relative_to(world.store))},
        )
        return world

    @property
    def store(self) -> Path:
        return self.root / "store" / RUN_ID

    def record(self, groups: range, version: int = 0, folder: Path | None = None) -> list[str]:
        """Samples and records whole groups; their trajectory ids in batch order."""
        rows = sample(folder or self.policy, 4, groups, version, seed=groups.start)
        write_ids = [
            self.lake.append(table, part, run_id=RUN_ID, cycle=0, lease=self.lease)
            for table, part in zip(("trajectories", "segments"), rows, strict=True)
        ]
        self.ledger.append("rollouts_recorded", lease=self.lease, write_ids=write_ids)
        return rows[0].column("trajectory_id").to_pylist()

    def admit(self, batch: int, ids: list[str]) -> int:
        admission = len(self.ledger.entries)
        write_id = write_batch(
            self.lake,
            run_id=RUN_ID,
            cycle=0,
            lease=self.lease,
            admission=admission,
            batch=batch,
            trajectory_ids=ids,
        )
        self.ledger.append(
            "batch_admitted",
            lease=self.lease,
            batch=batch,
            write_ids=[write_id],
            num_trajectories=len(ids),
            trajectories_hash=trajectories_hash(ids),
        )
        return admission

    @property
    def ledger(self):
        return self.lake.ledger(RUN_ID)

    def written(self, table: str, where: str) -> pa.Table:
        """Rows under this lease, whether or not the ledger names them."""
        return self.lake.read(
            table,
            run_id=RUN_ID,
            where=f"({where}) AND starts_with(write_id, '{self.lease:06d}-')",
            write_ids="all",
        )

    def wait_for(
        self, job: subprocess.Popen, table: str, where: str, num_rows: int = 1
    ) -> pa.Table:
        for _ in range(1200):
            rows = self.written(table, where)
            if len(rows) >= num_rows:
                return rows
            if job.poll() is not None:
                raise AssertionError(f"the job ended with {job.returncode}:\n{job.stderr.read()}")
            time.sleep(0.05)
        raise AssertionError(f"no {table} after 60 s")

    def accept(self, batch: int, admission: int, scores: pa.Table) -> None:
        self.ledger.append(
            "batch_accepted",
            lease=self.lease,
            batch=batch,
            write_ids=sorted(set(scores.column("write_id").to_pylist())),
            details={"admission": admission},
        )

    def refuse(self, batch: int, admission: int) -> None:
        self.ledger.append(
            "batch_refused", lease=self.lease, batch=batch, details={"admission": admission}
        )

    def trained(self, batch: int, steps: pa.Table) -> None:
        last = steps.to_pylist()[-1]
        self.ledger.append(
            "batch_trained",
            lease=self.lease,
            batch=batch,
            version=batch,
            write_ids=sorted(set(steps.column("write_id").to_pylist())),
            checkpoint=last["checkpoint"],
            root_hash=last["root_hash"],
        )

    def start(self, until_batch: int, lease: int | None = None) -> subprocess.Popen:
        return torchrun(
            self.config.trainer.ranks,
            *("trainers.job", "--lake", self.lake.uri, "--run-id", RUN_ID, "--cycle", 0),
            *(
                "--lease",
                self.lease if lease is None else lease,
                "--until-batch",
                until_batch,
                "--threads",
                1,
            ),
        )


def torchrun(num_ranks: int, *module_and_arguments) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), "-m", *map(str, module_and_arguments)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(job: subprocess.Popen, code: int = 0) -> str:
    """Waits for a job that has nothing left to do; its standard error."""
    error = job.stderr.read()
    assert job.wait(60) == code, error
    job.stdin.close()
    job.stderr.close()
    return error
