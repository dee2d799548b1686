"""What `rollhouse replay` refuses, in one sentence and before any trainer is started."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli import main
from tasks.lake import Lake, take_lease
from tasks.replay import plan_replay
from tests.small_run import RUN, SmallRun
from tests.tiny_run import TinyRun

VERSION_0 = "weights/v00000000-000001"


def checkpoint(batch: int) -> str:
    return f"checkpoints/b{batch:08d}-000001"


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    """Three batches of two steps, one a cycle, with a store that holds manifests alone."""
    config = TinyRun(tmp_path, tmp_path, (f"run.run_id={RUN}",)).config
    lake = Lake.create(tmp_path / "lake")
    ledger = lake.ledger(RUN)
    ledger.append("run_created", lease=0, details={"config": config.model_dump(mode="json")})
    run = SmallRun(lake, take_lease(ledger))
    run.commit("version_published", version=0, details={"uri": VERSION_0})
    run.commit("cycle_opened")
    for batch in (1, 2, 3):
        admission = run.admit(batch, run.record(batch))
        steps = [
            {"step": 2 * batch + m - 2, "batch": batch, "admission": admission, "minibatch": m}
            for m in (1, 2)
        ]
        run.commit(
            "batch_trained",
            batch=batch,
            write_ids=[run.append("steps", steps)],
            checkpoint=checkpoint(batch),
            details={"admission": admission},
        )
        run.close()
    store = tmp_path / "store" / RUN
    for folder in (VERSION_0, *map(checkpoint, (1, 2, 3))):
        (store / folder).mkdir(parents=True)
        name = "rollhouse-manifest.json" if folder == VERSION_0 else "manifest.json"
        (store / folder / name).write_text("{}")
    return run


@pytest.fixture
def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Calls the command, which must refuse, and returns its sentence."""

    def call(run: SmallRun, *options: str) -> str:
        monkeypatch.setenv("ROLLHOUSE_LAKE", run.lake.uri)
        monkeypatch.setattr(sys, "argv", ["rollhouse", "replay", *options])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert (ended.value.code, printed.out) == (2, ""), printed.err
        (sentence,) = printed.err.splitlines()
        return sentence

    return call


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--run", "other"], "has no run other; it has demo"),
        (["--step", "7"], "Run demo has no optimizer step 7; it has 1 to 6."),
        (["--step", "0"], "Run demo has no optimizer step 0; it has 1 to 6."),
        (["--store", "elsewhere"], "pass --store with where the run's store is now"),
        (["--store", "gs://bucket/store"], "s3://bucket/prefix"),
    ],
)
def test_bad_input_is_one_sentence(
    run: SmallRun, refusal: Callable[..., str], options: list[str], sentence: str
):
    assert sentence in refusal(run, *options)


def test_a_run_that_trained_nothing(tmp_path: Path, refusal: Callable[..., str]):
    run = SmallRun.create(Lake.create(tmp_path / "lake"))
    assert "Run demo has trained no batch yet, so there is nothing to replay." in refusal(run)


def test_without_a_store(run: SmallRun, tmp_path: Path, refusal: Callable[..., str]):
    shutil.rmtree(tmp_path / "store")
    assert "does not hold version 0 of run demo, which a replay needs" in refusal(run)


def expire(run: SmallRun, cycle: int, table: str) -> None:
    run.cycle = cycle
    row = {"action": "expire", "table_name": table, "policy": "tokens_days = 1", "num_rows": 1}
    run.append("maintenance", [row])


@pytest.mark.parametrize("table", ["segments", "scores", "routing"])
def test_what_expired_is_not_replayed(run: SmallRun, refusal: Callable[..., str], table: str):
    expire(run, 1, table)
    sentence = "The tokens, scores or routing of batch 2 expired by policy"
    assert sentence in refusal(run, "--step", "4")


def test_no_way_back(run: SmallRun, tmp_path: Path, refusal: Callable[..., str]):
    expire(run, 0, "segments")
    for batch in (1, 2):
        shutil.rmtree(tmp_path / "store" / RUN / checkpoint(batch))
    sentence = "Batch 3 has no way back: the checkpoint of batch 1 is gone, and its tokens"
    assert sentence in refusal(run, "--step", "5")


def test_no_way_back_since_the_checkpoint_expired(
    run: SmallRun, tmp_path: Path, refusal: Callable[..., str]
):
    row = {"action": "expire", "table_name": "checkpoints", "policy": "keep_checkpoints = 1"}
    run.append("maintenance", [row | {"checkpoints": [checkpoint(1), checkpoint(2)]}])
    for batch in (1, 2):
        shutil.rmtree(tmp_path / "store" / RUN / checkpoint(batch))
    lake, config = run.lake, TinyRun(tmp_path, tmp_path, (f"run.run_id={RUN}",)).config
    (item,) = plan_replay(lake, config, [3])
    assert (item.start, item.missing) == (0, None), "version 0 is a way back"
    expire(run, 0, "segments")
    assert refusal(run, "--step", "5") == (
        "rollhouse: Batch 3 has no way back: the checkpoint of batch 1 and its tokens, scores or "
        'routing expired by policy; `rollhouse sql "FROM maintenance"` says when.'
    )
