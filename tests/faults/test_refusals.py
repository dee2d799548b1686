"""A batch that breaks its contract stops the cycle before any backward pass, and the run waits
until a person has decided."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from flows.attachment import EngineRefused
from flows.engines import build_engines
from flows.opening import OpenRun
from flows.refusals import BatchRefused
from flows.run import execute_run_sync
from schemas.config import RunConfig
from tasks.decisions import decide, refusing_rules, undecided
from tasks.engines.protocol import Attestation, Generation, Request, RolloutEngine
from tasks.query import connect
from tasks.warm_start import starting_checkpoint
from tests.tiny_run import RUN_ID, TinyRun, count


class FaultyEngine:
    """A real engine behind a transport that spoils what it returns for training rollouts."""

    def __init__(self, engine: RolloutEngine, spoil: Callable[[Request, Generation], Generation]):
        self._engine = engine
        self._spoil = spoil

    async def generate(self, request: Request) -> Generation:
        generation = await self._engine.generate(request)
        is_probe = request.request_id.startswith("probe")
        return generation if is_probe else self._spoil(request, generation)

    def describe(self):
        return self._engine.describe()

    async def connect(self) -> None:
        await self._engine.connect()

    async def update(self, *arguments) -> Attestation:
        return await self._engine.update(*arguments)

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def close(self) -> None:
        await self._engine.close()


def shift_by_one(request: Request, generation: Generation) -> Generation:
    logprobs = generation.logprobs
    return replace(generation, logprobs=(*logprobs[1:], logprobs[0]))


def lose_every_logprob(request: Request, generation: Generation) -> Generation:
    return replace(generation, logprobs=(float("nan"),) * len(generation.logprobs))


def claim_a_later_version(request: Request, generation: Generation) -> Generation:
    spans = tuple(replace(s, weight_version=s.weight_version + 7) for s in generation.spans)
    return replace(generation, spans=spans)


def run_with(tiny: TinyRun, spoil) -> None:
    def make_engines(run: OpenRun) -> list[RolloutEngine]:
        return [FaultyEngine(engine, spoil) for engine in build_engines(run)]

    execute_run_sync(tiny.config, "tiny.toml", make_engines=make_engines)


def assert_nothing_was_trained(tiny: TinyRun) -> None:
    connection = connect(tiny.lake)
    assert connection.sql("SELECT count(*) FROM steps_all").fetchone() == (0,)
    assert count(tiny.entries, "batch_accepted") == 0
    assert not (tiny.root / "store" / RUN_ID / "checkpoints").exists()


def open_refusal(tiny: TinyRun) -> int:
    (refusal,) = undecided(tiny.entries)
    return refusal.seq


def assert_the_run_waits(tiny: TinyRun, *options: str) -> None:
    """Calling again samples nothing, writes nothing and names the two answers."""
    refusal, before = open_refusal(tiny), len(tiny.entries)
    result = tiny.run(*options)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    on = f"--lake {tiny.lake.uri} --run {RUN_ID} --refusal {refusal}"
    assert f"rollhouse approve {on} --reason TEXT" in result.stderr
    assert f"rollhouse waive {on} --rule " in result.stderr
    assert len(tiny.entries) == before


def approve(tiny: TinyRun) -> None:
    decide(tiny.lake, RUN_ID, open_refusal(tiny), reviewer="Ada", reason="the engine is broken")


def waive(tiny: TinyRun, *rules: str) -> None:
    refusal = open_refusal(tiny)
    decide(tiny.lake, RUN_ID, refusal, rules=rules, reviewer="Ada", reason="known, harmless")


def kill_after_the_decision(tiny: TinyRun) -> None:
    """Kills the controller that adopts a second decision before it does what follows from it."""
    # This process lives and holds the lease of the refused run.
    with tiny.start("--no-prefect", "--take-over") as process:
        tiny.wait_for(lambda entries: count(entries, "decision_adopted") == 2)
        process.kill()
        process.communicate()


def assert_every_rollout_ended(tiny: TinyRun, expected: dict[str, int]) -> None:
    ended = connect(tiny.lake).sql("SELECT ended, count(*) FROM trajectory_ends GROUP BY 1")
    assert dict(ended.fetchall()) == expected
    assert tiny.trained_twice() == []
    assert tiny.broken_invariants() == []


def test_gate_2_stops_shifted_logprobs_before_any_backward_pass(tiny_run):
    tiny = tiny_run("run.num_cycles=1")
    with pytest.raises(BatchRefused) as refused:
        run_with(tiny, shift_by_one)
    message = str(refused.value)
    assert "own_version_mismatch" in message and "batch 1" in message
    assert "00000016-000-0" in message, "the first training group comes after 16 held-out ones"
    assert_nothing_was_trained(tiny)
    assert_every_rollout_ended(tiny, {"refused": 32})
    pages = tiny.root / "store" / RUN_ID / "data_docs" / "index.html"
    assert f"Refusal {open_refusal(tiny)} waits for a person" in pages.read_text()
    assert_the_run_waits(tiny)
    approve(tiny)
    # In this process, which still holds the lease of the run that was refused.
    tiny.execute()
    assert count(tiny.entries, "cycle_closed") == 1
    assert [e.batch for e in tiny.entries if e.kind == "batch_trained"] == [1, 2]
    rows = tiny.lake.read("quarantine", run_id=RUN_ID).to_pylist()
    assert len(rows) == 32 and {row["action"] for row in rows} == {"refuse"}
    assert_every_rollout_ended(tiny, {"trained": 64, "refused": 32})
    assert "waits for a person" not in pages.read_text()


def test_a_batch_whose_rules_are_waived_is_trained_with_the_scores_it_has(tiny_run):
    tiny = tiny_run("run.num_cycles=1")
    with pytest.raises(BatchRefused):
        run_with(tiny, shift_by_one)
    refusal = tiny.entries[open_refusal(tiny)]
    rules = refusing_rules(tiny.lake, RUN_ID, refusal)
    assert len(rules) > 1 and "logprobs_aligned" in rules
    waive(tiny, "logprobs_aligned")
    with pytest.raises(BatchRefused, match="own_version_mismatch"):
        tiny.execute()
    assert_nothing_was_trained(tiny)
    assert_every_rollout_ended(tiny, {"refused": 32})
    waive(tiny, *(rule for rule in rules if rule != "logprobs_aligned"))
    # Killed between the decision and what follows from it, the next run does what is lacking.
    kill_after_the_decision(tiny)
    assert tiny.run("--no-prefect").returncode == 0
    assert count(tiny.entries, "batch_admitted") == 2
    (accepted, _) = [e for e in tiny.entries if e.kind == "batch_accepted"]
    scores = tiny.lake.read("scores", run_id=RUN_ID, write_ids="all")
    first = [row["write_id"] for row in scores.to_pylist() if row["batch"] == 1]
    assert set(first) < set(accepted.write_ids), "the batch was scored once"
    judged = tiny.lake.read("validations", run_id=RUN_ID, write_ids=accepted.write_ids).to_pylist()
    adopted = [e.seq for e in tiny.entries if e.kind == "decision_adopted"]
    failed = [row for row in judged if not row["ok"] and row["severity"] == "batch"]
    waived = {row["rule"]: row["waived_by"] for row in failed}
    assert waived == dict.fromkeys(rules, adopted[1]) | {"logprobs_aligned": adopted[0]}
    assert_every_rollout_ended(tiny, {"trained": 64})


def test_gate_1_stops_a_window_where_faults_are_the_rule(tiny_run):
    tiny = tiny_run("run.num_cycles=1", "run.batches_per_cycle=1")
    for spoil, rule in (
        (lose_every_logprob, "logprobs_present"),
        (claim_a_later_version, "versions_published"),
    ):

        def only_training(request: Request, generation: Generation, spoil=spoil) -> Generation:
            group = int(request.request_id.split("-")[0])
            return spoil(request, generation) if group >= 16 else generation

        with pytest.raises(BatchRefused) as refused:
            run_with(tiny, only_training)
        assert rule in str(refused.value) and "00000016-000-0" in str(refused.value)
        assert_nothing_was_trained(tiny)
        assert tiny.lake.read("trajectories", run_id=RUN_ID, where="split = 'train'").num_rows == 0
        approve(tiny)
    tiny.execute()
    assert count(tiny.entries, "cycle_closed") == 1
    assert_every_rollout_ended(tiny, {"trained": 32})


@pytest.mark.timeout(1200)  # Six runs, on a machine that may be busy.
def test_a_window_whose_share_of_faults_is_waived_is_recorded_without_sampling_it_again(tiny_run):
    tiny = tiny_run("run.num_cycles=1", "run.batches_per_cycle=1")

    def spoil_some(request: Request, generation: Generation) -> Generation:
        group = int(request.request_id.split("-")[0])
        is_one = group in (0, 1, 2, 3, 4, 16, 17, 18)
        return lose_every_logprob(request, generation) if is_one else generation

    with pytest.raises(BatchRefused, match="the evaluation of version 0"):
        run_with(tiny, spoil_some)
    waive(tiny, "row_fault_share")
    with pytest.raises(BatchRefused, match="32 trajectories meant for batch 1"):
        run_with(tiny, spoil_some)
    (evaluated,) = tiny.lake.read("evals", run_id=RUN_ID).to_pylist()
    assert (evaluated["num_tasks"], evaluated["k"]) == (11, 1)
    assert_the_run_waits(tiny, "--no-prefect")
    waive(tiny, "row_fault_share")
    shutil.copytree(tiny.root, tiny.root.with_name("before"))
    assert tiny.run("--no-prefect", "--take-over").returncode == 0
    uninterrupted = tiny.canonical_ledger()
    assert_every_rollout_ended(tiny, {"quarantined": 12, "trained": 32})
    rows = tiny.lake.read("trajectories", run_id=RUN_ID, where="split = 'train'", write_ids="all")
    assert rows.num_rows == 32 + 12, "five groups are kept and three are sampled"

    shutil.rmtree(tiny.root)
    shutil.move(tiny.root.with_name("before"), tiny.root)
    kill_after_the_decision(tiny)
    assert tiny.run("--no-prefect").returncode == 0
    assert tiny.canonical_ledger() == uninterrupted


def test_an_evaluation_without_one_sound_rollout_may_be_waived_and_has_no_result(tiny_run):
    tiny = tiny_run("run.num_cycles=1", "run.batches_per_cycle=1")

    def spoil_heldout(request: Request, generation: Generation) -> Generation:
        is_heldout = int(request.request_id.split("-")[0]) < 16
        return lose_every_logprob(request, generation) if is_heldout else generation

    with pytest.raises(BatchRefused, match="the evaluation of version 0"):
        run_with(tiny, spoil_heldout)
    waive(tiny, *refusing_rules(tiny.lake, RUN_ID, tiny.entries[open_refusal(tiny)]))
    result = tiny.run("--no-prefect", "--take-over", "--json")
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["pass_at_1_before"] == summary["pass_at_1_after"]
    assert summary["pass_at_1_after"]["version"] == 1
    evaluated = [e.details["pass_at_1"] for e in tiny.entries if e.kind == "evaluated"]
    assert evaluated == [None, summary["pass_at_1_after"]["mean"]]
    assert_every_rollout_ended(tiny, {"trained": 32})


def test_one_bad_rollout_costs_its_group_and_no_more(tiny_run):
    tiny = tiny_run("run.num_cycles=1", "run.batches_per_cycle=1")

    def spoil_one(request: Request, generation: Generation) -> Generation:
        is_it = request.request_id.startswith("00000017-002-0/")
        return lose_every_logprob(request, generation) if is_it else generation

    run_with(tiny, spoil_one)
    ended = connect(tiny.lake).sql(
        "SELECT ended, count(*), count(DISTINCT group_id) FROM trajectory_ends"
        " GROUP BY 1 ORDER BY 1"
    )
    assert ended.fetchall() == [("dropped", 3, 1), ("quarantined", 1, 1), ("trained", 32, 8)]


def test_a_scorer_that_fails_again_and_again_stops_the_run(tiny_run):
    # reasoning-gym's scorer of prime factors raises on an answer that is not made of integers.
    tiny = tiny_run(
        'environment.options={dataset="prime_factorization"}',
        "policy.warm_start.steps=1",
        "engine.max_model_tokens=512",
        "sampling.max_tokens=8",
    )
    result = tiny.run("--no-prefect")
    assert result.returncode == 1
    assert "failed_share" in result.stderr and "Traceback" not in result.stderr
    assert_nothing_was_trained(tiny)


def test_a_prompt_that_leaves_no_room_fails_its_rollouts_and_stops_the_run(tiny_run):
    tiny = tiny_run("engine.max_model_tokens=11")
    result = tiny.run("--no-prefect")
    assert result.returncode == 1
    assert "failed_share" in result.stderr and "Traceback" not in result.stderr


def test_an_engine_that_fails_its_probe_gets_no_request(tiny_run):
    tiny = tiny_run()

    class RawEngine(FaultyEngine):
        async def generate(self, request: Request) -> Generation:
            generation = await self._engine.generate(request)
            doubled = tuple(2 * x for x in generation.logprobs)
            return replace(generation, logprobs=doubled)

    def make_engines(run: OpenRun) -> list[RolloutEngine]:
        return [RawEngine(engine, shift_by_one) for engine in build_engines(run)]

    with pytest.raises(EngineRefused, match="not attached"):
        execute_run_sync(tiny.config, "tiny.toml", make_engines=make_engines)
    assert tiny.lake.read("trajectories", run_id=RUN_ID, write_ids="all").num_rows == 0


def test_an_engine_that_holds_other_weights_gets_no_request(tiny_run):
    tiny = tiny_run()

    class StaleEngine(FaultyEngine):
        async def update(self, version, weights_dir, root_hash, mode) -> Attestation:
            return await self._engine.update(version, weights_dir, "0" * 64, mode)

    def make_engines(run: OpenRun) -> list[RolloutEngine]:
        return [StaleEngine(engine, shift_by_one) for engine in build_engines(run)]

    with pytest.raises(EngineRefused, match="could not attest version 0"):
        execute_run_sync(tiny.config, "tiny.toml", make_engines=make_engines)
    assert count(tiny.entries, "cycle_opened") == 0


def from_checkpoint(tiny: TinyRun, folder: Path) -> RunConfig:
    """The tiny run starting from a Hugging Face folder."""
    data = tiny.config.model_dump(mode="json")
    data["policy"] = {"path": str(folder)}
    return RunConfig.model_validate(data)


def test_a_starting_checkpoint_that_is_not_there_is_refused(tiny_run, tmp_path: Path):
    tiny = tiny_run()
    with pytest.raises(ValueError, match=r"policy\.path: .* is not a folder; give"):
        execute_run_sync(from_checkpoint(tiny, tmp_path / "none"), "tiny.toml")
    assert tiny.entries == [], "the run is not created, so the path may be mended"


def test_a_starting_checkpoint_that_lacks_a_tensor_is_refused(tiny_run, tmp_path: Path):
    tiny = tiny_run()
    folder = tmp_path / "checkpoint"
    shutil.copytree(starting_checkpoint(tiny.config), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing tensors \['model\.norm\.weight'\]"):
        execute_run_sync(from_checkpoint(tiny, folder), "tiny.toml")
    assert tiny.entries == []


def test_pickled_weights_are_never_opened(tiny_run, tmp_path: Path):
    tiny = tiny_run()
    folder = tmp_path / "checkpoint"
    shutil.copytree(starting_checkpoint(tiny.config), folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="only pickled weights"):
        execute_run_sync(from_checkpoint(tiny, folder), "tiny.toml")
