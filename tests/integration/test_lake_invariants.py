"""Every invariant holds of a real run's lake, and each kind of damage is named by its own."""

import json
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from schemas.config import MaintenanceSection
from tasks.invariants import check_lake
from tasks.lake.lake import Lake
from tasks.maintain import maintain_run
from tasks.storage import open_storage
from tests.delta_readers import READERS, assert_agree
from tests.tiny_run import REPOSITORY, ROLLHOUSE, RUN_ID, TinyRun


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, tiny_policies: Path) -> TinyRun:
    """A finished run of one cycle, whose lake is only copied from."""
    tiny = TinyRun(tmp_path_factory.mktemp("sound"), tiny_policies, ("run.num_cycles=1",))
    result = tiny.run("--no-prefect")
    assert result.returncode == 0, result.stderr
    return tiny


@dataclass(frozen=True)
class Copy:
    """A lake and its store that may be damaged."""

    root: Path

    @property
    def uri(self) -> str:
        return str(self.root / "lake")

    def delta(self, table: str) -> DeltaTable:
        return DeltaTable(f"{self.uri}/{table}")

    def update(self, table: str, where: str, **values: str) -> None:
        """Changes rows as another Delta writer would, with log and statistics in order."""
        changed = self.delta(table).update(updates=values, predicate=where)
        assert changed["num_updated_rows"] > 0

    def delete(self, table: str, where: str) -> None:
        assert self.delta(table).delete(where)["num_deleted_rows"] > 0

    def repeat(self, table: str, change: Callable[[dict], dict]) -> None:
        """Appends the table's first row again, changed."""
        rows = self.delta(table).to_pyarrow_table()
        row = change(rows.slice(0, 1).to_pylist()[0])
        write_deltalake(
            f"{self.uri}/{table}",
            pa.Table.from_pylist([row], schema=rows.schema),
            mode="append",
        )

    def file(self, table: str) -> Path:
        return Path(sorted(self.delta(table).file_uris())[-1])

    def stored(self, pattern: str) -> Path:
        return sorted((self.root / "store" / RUN_ID).glob(pattern))[-1]

    def findings(self) -> dict[str, str]:
        """invariant -> what was found, of those that do not hold."""
        lake = Lake.open(self.uri, allow_missing=True)
        findings = check_lake(lake, store_uri=self.root / "store")
        return {f.invariant: f.found for f in findings if not f.ok}


@pytest.fixture
def copy(sound: TinyRun, tmp_path: Path) -> Copy:
    for name in ("lake", "store"):
        shutil.copytree(sound.root / name, tmp_path / name)
    return Copy(tmp_path)


def test_a_real_run_keeps_every_invariant(sound: TinyRun):
    findings = list(check_lake(sound.lake, store_uri=sound.root / "store"))
    assert [f for f in findings if not f.ok] == []
    found = {f.invariant: f.found for f in findings}
    assert found["ends"] == "64 trained"
    assert found["order"] == "2 admissions, 2 trained, 3 versions"
    assert found["write_ids"] == "rows that do not count: none"
    assert found["checkpoints"].startswith("2 checkpoints")


def negate(path: Path, at: int) -> None:
    """Changes the sign of the little-endian number whose last byte is at `at`."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x80
    path.write_bytes(data)


def change_checkpoint(path: Path, kind: str) -> None:
    """Negates the first value of a checkpoint's first master or moment, which is float32."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    start = min(h["data_offsets"][0] for name, h in header.items() if name.startswith(f"{kind}."))
    negate(path, 8 + length + start + 3)


def two_ends(copy: Copy) -> None:
    """A trained trajectory that is quarantined as well, in a write that counts."""
    batch = copy.delta("batches").to_pyarrow_table().slice(0, 1).to_pylist()[0]
    row = {name: batch[name] for name in ("run_id", "cycle", "trajectory_id", "write_id")}
    row |= {"group_id": 0, "rule": "lost", "observed": None, "action": "drop", "reason": "r"}
    schema = pa.schema(copy.delta("quarantine").schema().to_arrow())
    rows = pa.Table.from_pylist([row], schema=schema)
    write_deltalake(f"{copy.uri}/quarantine", rows, mode="append")


def never_ended(copy: Copy) -> None:
    """A rollout that was recorded and then forgotten."""
    change = {"trajectory_id": "00000900-000-0", "split": "train"}
    copy.repeat("trajectories", lambda row: row | change)


def admitted_twice(copy: Copy) -> None:
    first, *_ = copy.delta("batches").to_pyarrow_table(filters=[("batch", "=", 1)]).to_pylist()
    copy.update(
        "batches", "batch = 2 AND batch_position = 0", trajectory_id=f"'{first['trajectory_id']}'"
    )


DAMAGES: dict[str, tuple[Callable[[Copy], object], set[str], str]] = {
    "file deleted": (
        lambda c: c.file("segments").unlink(),
        {"files", "writes", "tokens"},
        "is missing",
    ),
    "file cut short": (
        lambda c: c.file("evals").write_bytes(c.file("evals").read_bytes()[:-9]),
        {"files", "writes"},
        "bytes has",
    ),
    "file overwritten": (
        lambda c: c.file("evals").write_bytes(b"x" * c.file("evals").stat().st_size),
        {"files", "writes"},
        "cannot be read",
    ),
    "ledger row's file deleted": (
        lambda c: Path(sorted(c.delta("ledger").file_uris())[4]).unlink(),
        {"files", "ledger"},
        "is missing",
    ),
    "ledger restored": (
        lambda c: c.delta("ledger").restore(c.delta("ledger").version() - 1),
        {"ledger"},
        "counts up to",
    ),
    "ledger restored to nothing": (
        lambda c: c.delta("ledger").restore(0),
        {"ledger"},
        "the last row is -1",
    ),
    "ledger row dropped": (lambda c: c.delete("ledger", "seq = 4"), {"ledger"}, "rows [4]"),
    "ledger row repeated": (
        lambda c: c.repeat("ledger", dict),
        {"ledger", "order"},
        "2 times",
    ),
    "data table restored": (
        lambda c: c.delta("evals").restore(c.delta("evals").version() - 1),
        {"writes"},
        "has no rows in any table",
    ),
    "segments restored": (
        lambda c: c.delta("segments").restore(c.delta("segments").version() - 1),
        {"writes", "tokens"},
        "its segments hold 0",
    ),
    "quarantine of a write of a dead lease": (
        lambda c: c.update("ledger", "kind = 'batch_trained' AND batch = 2", lease="0"),
        {"leases", "writes"},
        "names lease 0, not 1",
    ),
    "accepted row is another": (
        lambda c: c.update("ledger", "kind = 'batch_accepted' AND batch = 1", kind="'evaluating'"),
        {"order", "ledger"},
        "was not accepted",
    ),
    "version gap": (
        lambda c: c.update("ledger", "kind = 'version_published' AND version = 1", version="7"),
        {"order", "publications"},
        "version 1 is the next",
    ),
    "other trajectories recorded": (
        lambda c: c.update("ledger", "kind = 'evaluated'", trajectories_hash="'0'"),
        {"recorded"},
        "recorded other trajectories",
    ),
    "trajectory lost": (
        lambda c: c.delete("trajectories", "trajectory_id = '00000016-000-0'"),
        {"recorded", "tokens", "admissions"},
        "has no trajectories row",
    ),
    "trajectory admitted twice": (
        admitted_twice,
        {"admissions", "admitted_once", "scores", "ends"},
        "is in admissions [",
    ),
    "admission reordered": (
        lambda c: c.update("batches", "batch = 1", batch_position="31 - batch_position"),
        {"admissions"},
        "another order",
    ),
    "held-out rollout trained": (
        lambda c: c.update("trajectories", "group_id = 16 AND sample_index = 0", split="'heldout'"),
        {"heldout"},
        "is a held-out rollout",
    ),
    "token of a later version": (
        lambda c: c.update(
            "segments", "kind = 'action' AND trajectory_id = '00000016-000-0'", weight_version="5"
        ),
        {"lag"},
        "newer than",
    ),
    "token lost": (
        lambda c: c.update("trajectories", "group_id = 16", num_tokens="num_tokens + 1"),
        {"tokens"},
        "its segments hold",
    ),
    "segment repeated": (lambda c: c.repeat("segments", dict), {"tokens"}, "tokens"),
    "scores row lost": (
        lambda c: c.delete("scores", "trajectory_id = '00000016-000-0'"),
        {"scores"},
        "no scores row",
    ),
    "scores cut short": (
        lambda c: c.update(
            "scores",
            "trajectory_id = '00000016-000-0'",
            entropies="array_pop_back(entropies)",
        ),
        {"scores"},
        "scores of lengths",
    ),
    "steps row lost": (lambda c: c.delete("steps", "step = 2"), {"steps"}, "minibatches [1] of 2"),
    "step of another checkpoint": (
        lambda c: c.update("steps", "checkpoint IS NOT NULL", checkpoint="'elsewhere'"),
        {"steps"},
        "name checkpoints",
    ),
    "trajectory forgotten": (never_ended, {"recorded", "tokens", "ends"}, "never ended"),
    "two ends": (two_ends, {"ends"}, "ended as drop and trained in batch"),
    "write id made up": (
        lambda c: c.repeat("evals", lambda row: row | {"write_id": "7"}),
        {"write_ids"},
        "write id 7",
    ),
    "publication of other weights": (
        lambda c: c.update("publications", "version = 1", root_hash="'0'"),
        {"publications"},
        "name other weights",
    ),
    "publication lost": (
        lambda c: c.delete("publications", "version = 2"),
        {"publications", "writes"},
        "has 0 publications rows",
    ),
    "checkpoint edited": (
        lambda c: change_checkpoint(c.stored("checkpoints/*/*.safetensors"), "master"),
        {"checkpoints"},
        "holds root hash",
    ),
    "moment edited": (
        lambda c: change_checkpoint(c.stored("checkpoints/*/*.safetensors"), "exp_avg_sq"),
        {"checkpoints"},
        "was changed: its hash is another",
    ),
    "checkpoint without manifest": (
        lambda c: c.stored("checkpoints/*/manifest.json").unlink(),
        {"checkpoints"},
        "not a complete checkpoint",
    ),
    "weights edited": (
        lambda c: negate(c.stored("weights/*/model.safetensors"), -1),
        {"weights"},
        "does not have the hash",
    ),
    "weights without manifest": (
        lambda c: c.stored("weights/*/rollhouse-manifest.json").unlink(),
        {"weights"},
        "no manifest",
    ),
    "store gone": (
        lambda c: shutil.rmtree(c.root / "store"),
        {"checkpoints", "weights"},
        "not a complete checkpoint",
    ),
    "log without checkpoints": (
        lambda c: c.delta("steps").alter.set_table_properties({"delta.checkpointInterval": "100"}),
        {"tables"},
        "checkpointInterval is 100",
    ),
    "constraint dropped": (
        lambda c: c.delta("segments").alter.drop_constraint("kind_known"),
        {"tables"},
        "kind_known is missing",
    ),
    "table gone": (
        lambda c: shutil.rmtree(c.root / "lake" / "requests"),
        {"tables", "writes"},
        "requests is not there",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(copy: Copy, name: str):
    damage, invariants, text = DAMAGES[name]
    damage(copy)
    found = copy.findings()
    assert found.keys() == invariants, found
    assert any(text in line for line in found.values()), found


def test_a_checkpoint_that_expired_is_not_missed_and_the_newest_is(copy: Copy):
    lake, store = Lake.open(copy.uri), str(copy.root / "store")
    policy = MaintenanceSection(keep_checkpoints=1)
    maintain_run(lake, RUN_ID, policy, now=datetime.now(UTC), store_uri=store)
    assert len(list((copy.root / "store" / RUN_ID / "checkpoints").iterdir())) == 1
    held = {f.invariant: f.found for f in check_lake(lake, store_uri=store)}
    assert copy.findings() == {}
    assert held["checkpoints"] == "1 checkpoints, every byte hashed; 1 expired"
    newest = copy.stored("checkpoints/*")
    # Whatever is recorded of it, a run cannot go on without it.
    where = "table_name = 'checkpoints'"
    copy.update("maintenance", where, checkpoints=f"make_array('checkpoints/{newest.name}')")
    shutil.rmtree(newest)
    faults = copy.findings()["checkpoints"]
    assert "(batch 1)" in faults and "(batch 2)" in faults


@pytest.mark.parametrize(
    ("table", "invariants"),
    [("segments", {"writes", "tokens", "scores"}), ("scores", {"writes", "scores"})],
)
def test_what_a_policy_expired_is_not_missed(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, table: str, invariants: set[str]
):
    rows = copy.delta(table).to_pyarrow_table(columns=["write_id"])
    gone = frozenset(rows.column("write_id").to_pylist())
    copy.delete(table, "true")
    assert copy.findings().keys() == invariants
    monkeypatch.setattr("tasks.invariants.snapshot.expired_writes", lambda lake, run_id: gone)
    assert copy.findings() == {}


def rollhouse(*arguments: str, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ROLLHOUSE, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def test_the_command_says_which_run_and_what_to_do(sound: TinyRun, copy: Copy):
    done = rollhouse("doctor", "--lake", str(sound.root / "lake"), "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert all(row["ok"] and row["fix"] == "" and row["faults"] == [] for row in rows)
    copy.delete("steps", "step = 2")
    options = ("--lake", copy.uri, "--store", str(copy.root / "store"), "--run", RUN_ID)
    done = rollhouse("doctor", *options, "--json")
    assert done.returncode == 1
    (row,) = [row for row in json.loads(done.stdout) if not row["ok"]]
    assert (row["run"], row["check"]) == (RUN_ID, "steps")
    assert "from one backup" in row["fix"] and "batch 1" in row["faults"][0]
    assert "minibatches [1] of 2" in rollhouse("doctor", *options).stdout
    done = rollhouse("doctor", "--lake", copy.uri, "--run", "other")
    assert done.returncode == 2 and "has no run other; its runs: tiny" in done.stderr


def test_a_lake_in_a_bucket(sound: TinyRun, s3_uri: str):
    bucket = open_storage(s3_uri)
    for file in open_storage(sound.root / "lake").walk():
        bucket.write(file.path, (sound.root / "lake" / file.path).read_bytes())

    def broken() -> dict[str, str]:
        findings = check_lake(Lake.open(s3_uri), store_uri=sound.root / "store")
        return {f.invariant: f.found for f in findings if not f.ok}

    assert broken() == {}
    (lost, *_) = [f.path for f in bucket.walk("requests") if f.path.endswith(".parquet")]
    bucket.delete([lost])
    found = broken()
    assert found.keys() == {"files", "writes"}
    assert "is missing" in found["files"] and "has no rows in any table" in found["writes"]


@pytest.mark.parametrize("reader", READERS)
def test_other_readers_agree_on_a_real_run(sound: TinyRun, reader: str):
    assert_agree(str(sound.root / "lake"), reader)


def test_the_command_goes_back_in_time(sound: TinyRun):
    lake = ("--lake", str(sound.root / "lake"))
    trained = [entry.seq for entry in sound.entries if entry.kind == "batch_trained"]
    query = "SELECT (SELECT max(step) FROM steps), (SELECT max(seq) FROM ledger)"
    for seq, step in ((trained[0] - 1, ""), (trained[0], "2"), (trained[1], "4")):
        done = rollhouse("sql", query, *lake, "--csv", "--as-of", str(seq))
        assert done.stdout.split()[-1] == f"{step},{seq}", done.stderr
    done = rollhouse("sql", query, *lake, "--as-of", "99", "--run", RUN_ID)
    assert done.returncode == 2 and "rows 0 to" in done.stderr
    done = rollhouse("sql", query, *lake, "--run", RUN_ID)
    assert done.returncode == 2 and "--run goes with --as-of" in done.stderr
    done = rollhouse("describe", "steps", "--history", "--json", *lake)
    operations = [(row["version"], row["operation"]) for row in json.loads(done.stdout)]
    assert operations == [(2, "WRITE"), (1, "WRITE"), (0, "CREATE TABLE")]
    done = rollhouse("describe", "steps", "--history")
    assert done.returncode == 2 and "--history needs --lake" in done.stderr
    done = rollhouse("describe", "tokens", "--history", *lake)
    assert done.returncode == 2 and "no table tokens" in done.stderr
