"""Imports hold what their source says and nothing else, appear whole or not, and once."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from flows.opening import find_run
from schemas.views import view_sources
from tasks.interchange.imported import import_rollouts
from tasks.interchange.source import Options
from tasks.invariants import check_lake
from tasks.lake.batches import read_batch, trajectories_hash, write_batch
from tasks.lake.lake import Lake
from tasks.lake.ledger import Ledger
from tasks.progress import read_progress
from tasks.query import connect

FIXTURES = Path(__file__).parents[2] / "fixtures"
"""`trl` was written by TRL 1.16.0 on the tests' tiny policy, `prime_rl` by verifiers 0.4.1.dev86
as prime-rl's file monitor calls it."""


def imported(lake: Path, path: Path, origin: str, run_id: str = "r", **options: Any) -> dict:
    return import_rollouts(
        str(lake), path, run_id=run_id, origin=origin, options=Options(**options)
    )


def rows(lake: Path, sql: str) -> list[tuple[Any, ...]]:
    return connect(Lake.open(lake)).sql(sql).fetchall()


def verl_dump(folder: Path, step: int, scores: list[float], **extra: list[Any]) -> Path:
    """As verl's `_write_generations` writes a step: groups of two, sorted by nothing."""
    columns = {
        "input": [f"user\nproblem {i // 2}\nassistant\n" for i in range(len(scores))],
        "output": [f"answer {i} é" for i in range(len(scores))],
        "gts": ["42"] * len(scores),
        "score": scores,
        "step": [step] * len(scores),
        **extra,
    }
    folder.mkdir(exist_ok=True)
    file = folder / f"{step}.jsonl"
    with open(file, "w") as out:
        for i in range(len(scores)):
            entry = {name: values[i] for name, values in columns.items()}
            out.write(json.dumps(entry, ensure_ascii=False, default=str) + "\n")
    return file


def test_verl_text_becomes_trajectories_without_tokens(tmp_path: Path):
    dump = tmp_path / "dump"
    verl_dump(dump, 10, [1.0, 0.0, 0.25, 1.0])
    verl_dump(dump, 9, [0.5, -1.0], acc=[True, False])
    summary = imported(tmp_path / "lake", dump, "verl")
    assert [Path(file).name for file in summary["files"]] == ["9.jsonl", "10.jsonl"]
    assert (summary["trajectories"], summary["groups"], summary["tokens"]) == (6, 3, 0)
    assert summary["kept_in_origin_details"] == ["acc", "gts", "step"]
    assert rows(
        tmp_path / "lake",
        "SELECT trajectory_id, reward, origin, split, (origin_details->>'step')::INT,"
        " messages->0->>'content', messages->1->>'content' FROM trajectories ORDER BY 1 LIMIT 3",
    ) == [
        ("00000000-000-0", 0.5, "verl", "train", 9, "user\nproblem 0\nassistant\n", "answer 0 é"),
        ("00000000-001-0", -1.0, "verl", "train", 9, "user\nproblem 0\nassistant\n", "answer 1 é"),
        ("00000001-000-0", 1.0, "verl", "train", 10, "user\nproblem 0\nassistant\n", "answer 0 é"),
    ]
    # Nothing that the dump does not say is filled in.
    assert rows(
        tmp_path / "lake",
        "SELECT count(status), count(finish_reason), count(num_tokens), count(num_turns),"
        " count(sampling), count(weight_version_min), count(engine), count(tokenizer_sha256),"
        " count(started_at), count(environment), (SELECT count(*) FROM segments) FROM trajectories",
    ) == [(0,) * 11]
    missing = {row["rule"]: row["rollouts"] for row in summary["not_held"]}
    assert missing == {"token_ids_recorded": 6, "sampling_recorded": 6}


def test_verl_groups_by_uid_where_the_trainer_writes_it(tmp_path: Path):
    uids = ["b-a_0_0", "b-a_1_0", "c_0_0", "c_1_0"]
    same = {"input": ["one problem"] * 4, "uid": uids}
    summary = imported(tmp_path / "lake", verl_dump(tmp_path / "d", 1, [0.0] * 4, **same), "verl")
    assert summary["groups"] == 2
    found = rows(
        tmp_path / "lake",
        "SELECT group_id, sample_index, origin_details->>'uid' FROM trajectories ORDER BY 1, 2",
    )
    assert found == [(0, 0, uids[0]), (0, 1, uids[1]), (1, 0, uids[2]), (1, 1, uids[3])]


def test_a_score_that_is_no_number_is_missing(tmp_path: Path):
    file = verl_dump(tmp_path / "d", 1, [math.nan, 1.0])
    assert "NaN" in file.read_text()
    summary = imported(tmp_path / "lake", file, "verl", split="heldout")
    assert summary["nonfinite_as_null"] == 1
    assert rows(tmp_path / "lake", "SELECT reward, split FROM trajectories ORDER BY 1") == [
        (1.0, "heldout"),
        (None, "heldout"),
    ]


def test_a_file_that_trl_wrote(tmp_path: Path):
    folder = FIXTURES / "trl"
    rewards = {"short_reward": 1.0, "digits_reward": 0.5}
    summary = imported(tmp_path / "lake", folder, "trl", rewards=rewards)
    written = pd.concat(
        pd.read_parquet(folder / f"completions_{step:05d}.parquet") for step in (1, 3)
    )
    # With two steps a generation, TRL logs each generation twice.
    assert [Path(row["file"]).name for row in summary["files_left_out"]] == [
        "completions_00002.parquet"
    ]
    assert summary["trajectories"] == len(written) == 16
    assert summary["kept_in_origin_details"] == ["advantage", "digits", "step"]
    found = rows(
        tmp_path / "lake",
        "SELECT reward, reward_components['short_reward'], messages->0->>'role',"
        " messages->1->>'content', (origin_details->>'advantage')::DOUBLE"
        " FROM trajectories ORDER BY group_id, sample_index",
    )
    expected = [
        (
            row.short_reward + 0.5 * row.digits_reward,
            row.short_reward,
            "user",
            row.completion[0]["content"],
            row.advantage,
        )
        for row in written.itertuples()
    ]
    assert sorted(found) == sorted(expected)


def test_trl_text_with_a_reward_function_that_does_not_apply(tmp_path: Path):
    # TRL before 1.16 decodes prompts and completions; None of a reward function is NaN.
    table = {
        "step": [3, 3],
        "prompt": ["p", "p"],
        "completion": ["a", "b"],
        "exact": [1.0, float("nan")],
        "advantage": [0.5, float("nan")],
    }
    file = tmp_path / "completions_00003.parquet"
    pd.DataFrame(table).to_parquet(file)
    imported(tmp_path / "lake", tmp_path, "trl")
    found = rows(tmp_path / "lake", "SELECT reward, reward_components FROM trajectories ORDER BY 2")
    # The weights of the reward functions are not in the file, so their sum is not known.
    assert found == [(None, {}), (None, {"exact": 1.0})]
    with pytest.raises(ValueError, match="no reward column exakt; its numeric columns are exact"):
        imported(tmp_path / "lake2", file, "trl", rewards={"exakt": 1.0})


def test_an_episode_that_verifiers_wrote(tmp_path: Path):
    summary = imported(tmp_path / "lake", FIXTURES / "prime_rl", "prime-rl")
    assert (summary["trajectories"], summary["groups"]) == (3, 2)
    assert (summary["tokens"], summary["action_tokens"]) == (25, 6)
    assert rows(
        tmp_path / "lake",
        "SELECT sequence_index, segment_index, start_position, turn_index, kind, weight_version,"
        " token_ids FROM segments ORDER BY ALL",
    ) == [
        (0, 0, 0, 0, "prompt", None, [1, 2, 3, 4, 5, 6]),
        (0, 1, 6, 0, "action", 4, [7, 8]),
        (0, 2, 8, 0, "action", 5, [9]),
        (0, 3, 9, 1, "observation", None, [10, 11, 6]),
        (0, 4, 12, 1, "action", 5, [12]),
        (1, 0, 0, 2, "prompt", None, [1, 2, 3, 4, 5, 6, 7, 8, 9, 6]),
        (1, 1, 10, 2, "action", 5, [13, 14]),
    ]
    # rewards: 1.0 x 2.0 + 0.5 x 1.0; the second trace was relayed as text; the third failed.
    assert rows(
        tmp_path / "lake",
        "SELECT status, finish_reason, reward, num_sequences, num_turns, weight_version_min,"
        " weight_version_max, sampling.temperature, sampling.top_k, environment, logprobs_mode"
        " FROM trajectories ORDER BY trajectory_id",
    ) == [
        ("truncated", "length", 2.5, 2, 3, 4, 5, 0.7, None, "sums-train", "rounded to 4 decimals"),
        ("completed", "stop", 0.0, None, 1, 4, 5, 0.7, None, "sums-train", None),
        ("failed", "TimeoutError", None, None, 0, 4, 5, None, None, "sums-train", None),
    ]
    missing = {row["rule"]: row["rollouts"] for row in summary["not_held"]}
    assert missing == {
        "token_ids_recorded": 2,
        "logprobs_unrounded": 1,
        "sampling_recorded": 1,
        "reward_recorded": 1,
    }
    assert "trace.nodes.timestamp" in summary["kept_in_origin_details"]


def token_export(file: Path, **changes: Any) -> dict[str, Any]:
    """A line as prime-rl's `TokenExporter` writes it."""
    record = {
        "schema_version": 1,
        "step": 2,
        "rank": 0,
        "export_sequence_idx": 0,
        "env_name": "sums",
        "token_ids": [5, 6, 7, 8, 9],
        "loss_mask": [False, True, True, False, True],
        "advantages": [0.0, 0.5, 0.5, 0.0, 0.5],
        "inference_logprobs": [0.0, -0.10000000149011612, None, 0.0, -1e-7],
        "entropy": [None] * 5,
    } | changes
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a") as out:
        out.write(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n")
    return record


def test_a_token_export_keeps_ids_and_the_bits_of_logprobs(tmp_path: Path):
    file = tmp_path / "token_exports" / "step_2" / "rank_0.jsonl"
    token_export(file)
    imported(tmp_path / "lake", tmp_path / "token_exports", "prime-rl")
    assert rows(
        tmp_path / "lake",
        "SELECT position, token_id, kind, rollout_logprob, weight_version FROM tokens ORDER BY 1",
    ) == [
        (0, 5, "prompt", None, None),
        (1, 6, "action", pytest.approx(-0.10000000149011612, abs=0), None),
        (2, 7, "action", None, None),
        (3, 8, "observation", None, None),
        (4, 9, "action", pytest.approx(-1e-7, rel=1e-7), None),
    ]
    # A sampled token whose log-probability was not finite is a fault, not a guess.
    assert rows(tmp_path / "lake", "SELECT ended, reason FROM trajectory_ends") == [
        ("quarantined", "logprobs_present: rule logprobs_present counted 1")
    ]


def test_ids_without_logprobs_have_segments_with_null(tmp_path: Path):
    text = (FIXTURES / "prime_rl/step_5/train/all/traces.jsonl").read_text()
    record = json.loads(text.splitlines()[0])
    for node in record["traces"][0]["nodes"]:
        node["logprobs"] = []
    del record["run"]["work"]["policy"]
    for node in record["traces"][0]["nodes"]:
        node.pop("weight_versions", None)
    file = tmp_path / "traces.jsonl"
    file.write_text(json.dumps(record) + "\n")
    summary = imported(tmp_path / "lake", file, "prime-rl")
    assert {row["rule"] for row in summary["not_held"]} == {
        "logprobs_recorded",
        "versions_recorded",
    }
    assert summary["quarantined"] == 0
    assert rows(
        tmp_path / "lake",
        "SELECT count(*), count(rollout_logprob), count(weight_version),"
        " count(*) FILTER (loss_mask) FROM tokens",
    ) == [(25, 0, 0, 6)]
    assert rows(tmp_path / "lake", "SELECT ended FROM trajectory_ends") == [("imported",)]


def test_effective_episodes_are_not_imported_beside_all(tmp_path: Path):
    kind = tmp_path / "rollouts" / "step_5" / "train"
    shutil.copytree(FIXTURES / "prime_rl/step_5/train/all", kind / "all")
    shutil.copytree(FIXTURES / "prime_rl/step_5/train/all", kind / "effective")
    summary = imported(tmp_path / "lake", tmp_path / "rollouts", "prime-rl")
    assert summary["trajectories"] == 3
    assert "`all` file beside it" in summary["files_left_out"][0]["why"]


def test_the_same_content_is_imported_once_and_a_grown_file_from_its_end(tmp_path: Path):
    file = tmp_path / "step_2" / "rank_0.jsonl"
    token_export(file)
    assert imported(tmp_path / "lake", file, "prime-rl")["trajectories"] == 1
    copy = tmp_path / "copy.jsonl"
    shutil.copy(file, copy)
    again = imported(tmp_path / "lake", copy, "prime-rl")
    assert again["trajectories"] == 0
    assert again["files_left_out"][0]["why"].endswith("imported before, as rank_0.jsonl")
    token_export(file, token_ids=[1, 2, 3, 4, 5])
    assert imported(tmp_path / "lake", file, "prime-rl")["trajectories"] == 1
    assert rows(
        tmp_path / "lake",
        "SELECT trajectory_id, token_ids[1] FROM segments WHERE kind = 'prompt' ORDER BY 1",
    ) == [("00000000-000-0", 5), ("00000001-000-0", 1)]
    with open(file, "a") as out:
        out.write("{\n")
    with pytest.raises(ValueError, match=r"rank_0.jsonl line 3: not JSON"):
        imported(tmp_path / "lake", file, "prime-rl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"2.jsonl line 3: not JSON .*nothing was imported"),
        ("[1]", "line 3: not a JSON object"),
        ('{"input": "a", "score": 1}', r"line 3: no field 'output' \(it has score\)"),
        ('{"input": "a", "output": "b", "score": "1"}', "line 3: field 'score' is \"1\""),
        ('{"input": "a", "output": null, "score": 1}', "line 3: 'input' or 'output' is null"),
    ],
)
def test_a_malformed_line_leaves_nothing_of_any_file(tmp_path: Path, line: str, message: str):
    verl_dump(tmp_path / "d", 1, [1.0, 0.0])
    with open(verl_dump(tmp_path / "d", 2, [1.0, 0.0]), "a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=message):
        imported(tmp_path / "lake", tmp_path / "d", "verl")
    lake = Lake.open(tmp_path / "lake")
    assert lake.run_ids() == [] and lake.files("trajectories") == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [1, 2, 3, 4, -5]}, "'token_ids' is not a list of token ids"),
        ({"token_ids": [1, 2, 3, 4, 2**31]}, "'token_ids' is not a list of token ids"),
        ({"loss_mask": [True]}, "'loss_mask' is not a list of 5 booleans"),
        ({"inference_logprobs": [0.0, "x", 0.0, 0.0, 0.0]}, "not a list of 5 numbers"),
        ({"inference_logprobs": [0.0]}, "not a list of 5 numbers"),
    ],
)
def test_tokens_that_do_not_fit_together_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
):
    file = tmp_path / "rank_0.jsonl"
    token_export(file, **changes)
    with pytest.raises(ValueError, match=f"line 1: .*{message}"):
        imported(tmp_path / "lake", file, "prime-rl")


def test_what_cannot_be_imported_is_one_sentence(tmp_path: Path):
    lake, file = tmp_path / "lake", verl_dump(tmp_path / "d", 1, [1.0])
    with pytest.raises(ValueError, match="no such file or folder"):
        imported(lake, tmp_path / "absent", "verl")
    with pytest.raises(ValueError, match="holds no rollouts as trl writes them"):
        imported(lake, tmp_path / "d", "trl")
    with pytest.raises(ValueError, match="is not a Parquet file"):
        imported(lake, file, "trl")
    with pytest.raises(ValueError, match="neither an episode"):
        imported(lake, file, "prime-rl")
    with pytest.raises(ValueError, match="use letters, digits"):
        imported(lake, file, "verl", run_id="a/b")
    with pytest.raises(ValueError, match="--reward names columns of TRL's files"):
        imported(lake, file, "verl", rewards={"x": 1.0})
    imported(lake, file, "verl")
    with pytest.raises(ValueError, match="holds rollouts imported from verl; give those of trl"):
        imported(lake, FIXTURES / "trl", "trl")
    Lake.open(lake).ledger("own").append("run_created", lease=0, details={"config": {}})
    with pytest.raises(ValueError, match="holds its own rollouts"):
        imported(lake, file, "verl", run_id="own")


def test_a_crash_before_the_ledger_row_leaves_nothing_visible(tmp_path: Path, monkeypatch):
    file = verl_dump(tmp_path / "d", 1, [1.0, 0.0])
    append = Ledger.append

    def crash(self: Ledger, kind: str, **columns: Any) -> Any:
        if kind == "rollouts_recorded":
            raise KeyboardInterrupt
        return append(self, kind, **columns)

    monkeypatch.setattr(Ledger, "append", crash)
    with pytest.raises(KeyboardInterrupt):
        imported(tmp_path / "lake", file, "verl")
    monkeypatch.undo()
    assert rows(tmp_path / "lake", "SELECT count(*) FROM trajectories") == [(0,)]
    assert imported(tmp_path / "lake", file, "verl")["trajectories"] == 2
    assert rows(tmp_path / "lake", "SELECT count(*) FROM trajectories") == [(2,)]


def test_gate_1_judges_what_it_can(tmp_path: Path):
    file = tmp_path / "rank_0.jsonl"
    token_export(file, inference_logprobs=[0.0, 0.5, -1.0, 0.0, -1.0])
    token_export(file, inference_logprobs=[0.0, -0.5, -1.0, 0.0, -1.0])
    summary = imported(tmp_path / "lake", file, "prime-rl")
    assert summary["quarantined"] == 1
    judged = dict(
        rows(tmp_path / "lake", "SELECT rule, ok FROM validations WHERE gate = 1 ORDER BY rule")
    )
    assert judged["logprobs_not_positive"] is False and judged["positions_contiguous"] is True
    # What has no bound or no counterpart in an import was not judged, so it did not pass.
    assert not {"ids_in_vocabulary", "requests_agree", "sampling_as_configured"} & set(judged)


def test_an_imported_run_is_never_trained(tmp_path: Path, tiny_run):
    tiny = tiny_run()
    path = FIXTURES / "prime_rl"
    imported(tiny.root / "lake", path, "prime-rl", run_id="tiny")
    with pytest.raises(ValueError, match="holds rollouts imported from prime-rl, which are never"):
        find_run(tiny.config, "tiny.toml", lambda event: None)
    lake = tiny.lake
    progress = read_progress(lake, "tiny")
    assert progress.num_recorded == 3 and progress.finished == ()
    # Even a ledger that admits one all the same gives the trainer nothing.
    ledger = lake.ledger("tiny")
    seq, ids = len(ledger.entries), ["00000000-000-0"]
    write = write_batch(
        lake,
        run_id="tiny",
        cycle=0,
        lease=ledger.lease,
        admission=seq,
        batch=1,
        trajectory_ids=ids,
    )
    ledger.append(
        "batch_admitted",
        lease=ledger.lease,
        batch=1,
        write_ids=[write],
        num_trajectories=1,
        trajectories_hash=trajectories_hash(ids),
    )
    with pytest.raises(ValueError, match="only rollouts sampled here are trained"):
        read_batch(lake, "tiny", seq)


def test_every_view_works_over_an_import(tmp_path: Path):
    imported(tmp_path / "lake", FIXTURES / "prime_rl", "prime-rl")
    connection = connect(Lake.open(tmp_path / "lake"))
    counts = {
        name: connection.sql(f"SELECT count(*) FROM {name}").fetchall()[0][0]
        for name in view_sources()
    }
    assert (counts["tokens"], counts["tokens_all"], counts["trajectory_ends"]) == (25, 25, 3)
    assert counts["token_scores"] == counts["signals_by_step"] == 0


def test_a_lake_of_imports_keeps_every_invariant(tmp_path: Path):
    imported(tmp_path / "lake", FIXTURES / "trl", "trl", rewards={"short_reward": 1.0})
    imported(tmp_path / "lake", verl_dump(tmp_path, 1, [0.0, 1.0]), "verl", run_id="other")
    findings = list(check_lake(Lake.open(tmp_path / "lake")))
    assert [finding for finding in findings if not finding.ok] == []
    assert {finding.run_id for finding in findings} == {None, "r", "other"}
