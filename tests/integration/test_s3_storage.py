"""A lake in a bucket of a real S3 server: credentials, refusals and outages."""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks.lake import Lake, take_lease
from tasks.query import QueryRefused, connect, run_query
from tasks.storage import StorageError, open_storage, s3
from tests.s3_server import BUCKET, KEYS, S3Server
from tests.tables import decisions
from tests.tiny_run import REPOSITORY, ROLLHOUSE

RUN = "demo"
SECRET = KEYS["AWS_SECRET_ACCESS_KEY"]


def adopt(lake: Lake, lease: int, number: int) -> None:
    options = {"run_id": RUN, "cycle": 0, "lease": lease}
    write_id = lake.append("decisions", decisions(number), **options)
    lake.ledger(RUN).append("decision_adopted", lease=lease, write_ids=[write_id])


def started(uri: str) -> tuple[Lake, int]:
    lake = Lake.create(uri)
    lake.ledger(RUN).append("run_created", lease=0)
    return lake, take_lease(lake.ledger(RUN))


def test_files_of_a_bucket(s3_uri: str):
    root = open_storage(s3_uri)
    root.write("a/b/one", b"1")
    root.write("a/two", b"22")
    root.write("ab/three", b"333")
    assert sorted((f.path, f.size_bytes) for f in root.walk("a")) == [("a/b/one", 1), ("a/two", 2)]
    assert [f.path for f in root.child("a").walk("b")] == ["b/one"]
    assert root.child("a").read("b/one") == b"1"
    assert root.exists("a/two") and not root.exists("a")
    root.delete(["a/two", "a/never"])
    assert sorted(f.path for f in root.walk()) == ["a/b/one", "ab/three"]


def test_a_query_reads_the_lake_and_no_other_object(s3_uri: str):
    lake, lease = started(s3_uri)
    adopt(lake, lease, 7)
    open_storage(f"s3://{BUCKET}").write("elsewhere.csv", b"a\n1\n")
    connection = connect(Lake.open(s3_uri))
    assert run_query(connection, "SELECT admission FROM decisions")[1] == [(7,)]
    for sql in (
        f"FROM read_csv('s3://{BUCKET}/elsewhere.csv')",
        "FROM read_text('/etc/hostname')",
    ):
        with pytest.raises(QueryRefused, match="disabled by configuration"):
            run_query(connection, sql)
    for sql in ("FROM duckdb_secrets()", "FROM duckdb_settings()"):
        assert SECRET not in str(run_query(connection, sql))


def test_the_command_line_takes_an_address(s3_uri: str):
    lake, lease = started(s3_uri)
    adopt(lake, lease, 7)
    command = [*ROLLHOUSE, "sql", "SELECT admission FROM decisions", "--lake", s3_uri, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"admission": 7' in done.stdout


def bytes_of(folder: Path) -> Iterator[bytes]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.read_bytes()


def test_credentials_are_written_nowhere(s3_uri: str, s3_server: S3Server):
    lake, lease = started(s3_uri)
    adopt(lake, lease, 1)
    stored = b"".join(file for file in bytes_of(s3_server.root / "data"))
    assert s3_uri.rpartition("/")[2].encode() in stored, "the server's data was searched"
    assert SECRET.encode() not in stored


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"AWS_ACCESS_KEY_ID": None}, ValueError, "No credentials for s3://.*AWS_PROFILE"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, StorageError, "Cannot use bucket.*credentials"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, StorageError, "Could not connect"),
    ],
)
def test_what_cannot_be_reached_says_so(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch, changes: dict, error: type, message: str
):
    monkeypatch.setattr(s3, "OUTAGE_S", 1)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in changes.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(error, match=message) as caught:
        Lake.create(s3_uri)
    assert SECRET not in str(caught.value)


@pytest.mark.usefixtures("s3_uri")
def test_addresses_that_name_nothing():
    with pytest.raises(StorageError, match="Cannot use bucket no-such-bucket"):
        Lake.create("s3://no-such-bucket/lake")
    with pytest.raises(ValueError, match="No lake at s3://"):
        Lake.open(f"s3://{BUCKET}/no-such-lake")
    with pytest.raises(ValueError, match="names no bucket"):
        Lake.open("s3://")


def test_twenty_seconds_without_a_server(own_server: S3Server):
    lake, lease = started(f"s3://{BUCKET}/lake")
    adopt(lake, lease, 0)

    def return_later() -> None:
        time.sleep(20)
        own_server.start()

    works: list[Callable[[], object]] = [
        lambda: adopt(lake, lease, 1),
        lambda: lake.read("decisions", run_id=RUN),
        lambda: lake.ledger(RUN).append("lease_renewed", lease=lease),
    ]
    own_server.stop()
    returning = threading.Thread(target=return_later)
    returning.start()
    workers = [threading.Thread(target=work) for work in works]
    for worker in workers:
        worker.start()
    for worker in (*workers, returning):
        worker.join()
    again = Lake.open(f"s3://{BUCKET}/lake")
    assert again.read("decisions", run_id=RUN).column("admission").to_pylist() == [0, 1]
    kinds = [entry.kind for entry in again.ledger(RUN).entries[2:]]
    assert sorted(kinds) == ["decision_adopted", "decision_adopted", "lease_renewed"]


def test_a_server_that_is_gone_for_good(own_server: S3Server, monkeypatch: pytest.MonkeyPatch):
    lake, lease = started(f"s3://{BUCKET}/lake")
    adopt(lake, lease, 0)
    own_server.stop()
    with monkeypatch.context() as impatient:
        impatient.setattr(s3, "OUTAGE_S", 2)
        for work in (
            lambda: adopt(lake, lease, 1),
            lambda: lake.read("decisions", run_id=RUN),
            lambda: lake.ledger(RUN).append("lease_renewed", lease=lease),
            lambda: Lake.open(f"s3://{BUCKET}/lake"),
        ):
            with pytest.raises(StorageError, match=r"Cannot .*s3://.*run the same command again"):
                work()
    own_server.start()
    again = Lake.open(f"s3://{BUCKET}/lake")
    assert again.read("decisions", run_id=RUN).num_rows == 1
    adopt(again, lease, 1)
    assert again.read("decisions", run_id=RUN).num_rows == 2
