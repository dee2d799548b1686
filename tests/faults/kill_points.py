"""The places of death between two ledger commits, one a row.

Occurrences are the candidates of a point: seed s dies at the (s mod n)-th of them, so five seeds
die at other batches, windows and tables. A run of these tests has one cycle of two batches: three
publications, two evaluations and four windows, whose ledger rows are numbered

    0 run_created  1 lease_taken  2 version_published 0  3 cycle_opened  4 evaluated 0
    5, 10 rollouts_recorded  6, 11 batch_admitted  7, 12 batch_accepted  8, 13 batch_trained
    9, 14 version_published  15 evaluated 2  16 cycle_closed

and ledger row n is version n + 1 of its Delta table.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """On entry to (`before`) or return from (`after`) the n-th call whose path matches, of those
    `kill_server` knows; `within` an `open` the process dies when half of the first write is there.
    """

    call: str
    path: str
    moment: str
    nth: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class SystemCall:
    """On entry to the first of these calls on this very file of the lake, which delta-rs makes. Of
    `.json#1`, its staging file, that is the write into it; of `.json` the link that is the commit.
    """

    path: str
    versions: tuple[int, ...] = (0,)
    calls: str = "write,link,linkat"


@dataclass(frozen=True)
class Request:
    """At the n-th S3 request whose method and path match: `before` the server sees it, `within`
    its body, or once it is `answered` and before the process learns of it."""

    request: str
    moment: str
    nth: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Point:
    name: str
    process: str
    place: Call | SystemCall | Request


def _points(process: str, places: dict[str, Call | SystemCall | Request]) -> tuple[Point, ...]:
    return tuple(Point(name, process, place) for name, place in places.items())


LOG = "_delta_log/{:020d}.json"
WINDOWS = (2, 3, 1, 4)
"""Evaluation 0 is the first window, the batches' are the next two."""

ON_DISK = (
    *_points(
        "controller",
        {
            "before a table is created": Call("create", "/lake/", "before", (7, 1, 12, 3, 14)),
            "writing a table's creation": SystemCall("trajectories/" + LOG + "#1"),
            "linking a table's creation": SystemCall("steps/" + LOG),
            "after run_created": Call("row", "^run_created", "after"),
            "after lease_taken": Call("row", "^lease_taken", "after"),
            "half of an anchor's weights": Call("open", r"weights/\..*safetensors$", "within"),
            "fsync of an anchor's weights": Call(
                "fsync", r"weights/\..*safetensors$", "before", (2, 3, 1)
            ),
            "half of an anchor's manifest": Call(
                "open", r"weights/.*rollhouse-manifest", "within", (3, 1, 2)
            ),
            "before an anchor's rename": Call("rename", "/weights/", "before", (2, 3, 1)),
            "after an anchor's rename": Call("rename", "/weights/", "after", (3, 1, 2)),
            "before the publications commit": Call("commit", "publications$", "before", (2, 3, 1)),
            "after the publications commit": Call("commit", "publications$", "after", (3, 1, 2)),
            "before version_published": Call("row", "^version_published", "before", (2, 3, 1)),
            "after version_published": Call("row", "^version_published", "after", (3, 1, 2)),
            "before the engine's update": Call("update", "", "before", (2, 3, 1)),
            "after the engine's update": Call("update", "", "after", (2, 3, 1)),
            "before the attestations commit": Call("commit", "attestations$", "before", (1, 2, 3)),
            "after the attestations commit": Call("commit", "attestations$", "after", (2, 3, 1)),
            "in the middle of sampling": Call("generate", "", "after", (8, 15, 22, 2, 11)),
            "half of a trajectories file": Call(
                "open", r"trajectories/.*parquet$", "within", WINDOWS
            ),
            "after the trajectories commit": Call("commit", "trajectories$", "after", WINDOWS),
            "fsync of a segments file": Call("fsync", r"segments/.*parquet$", "before", WINDOWS),
            "writing the segments commit": SystemCall("segments/" + LOG + "#1", (2, 3, 1, 4)),
            "linking the segments commit": SystemCall("segments/" + LOG, (3, 2, 4, 1)),
            "before the requests commit": Call("commit", "requests$", "before", WINDOWS),
            "after the validations commit": Call("commit", "validations$", "after", (2, 4, 1, 3)),
            "before rollouts_recorded": Call("row", "^rollouts_recorded", "before", (1, 2)),
            "after rollouts_recorded": Call("row", "^rollouts_recorded", "after", (2, 1)),
            "fsync of a batches file": Call("fsync", r"batches/.*parquet$", "after", (1, 2)),
            "linking the batches commit": SystemCall("batches/" + LOG, (1, 2)),
            "before batch_admitted": Call("row", "^batch_admitted", "before", (1, 2)),
            "after batch_admitted": Call("row", "^batch_admitted", "after", (2, 1)),
            "before batch_accepted": Call("row", "^batch_accepted", "before", (1, 2)),
            "after batch_accepted": Call("row", "^batch_accepted", "after", (2, 1)),
            "before batch_trained": Call("row", "^batch_trained", "before", (1, 2)),
            "after batch_trained": Call("row", "^batch_trained", "after", (2, 1)),
            "half of a ledger file": Call(
                "open", r"ledger/.*parquet$", "within", (6, 9, 12, 5, 15)
            ),
            "writing a ledger commit": SystemCall("ledger/" + LOG + "#1", (7, 9, 12, 3, 15)),
            "linking a ledger commit": SystemCall("ledger/" + LOG, (8, 6, 13, 2, 14)),
            "fsync of a ledger commit": Call(
                "fsync", r"ledger/_delta_log/\d+\.json$", "before", (9, 10, 14, 3, 16)
            ),
            "writing the ledger's checkpoint": SystemCall(
                "ledger/_delta_log/{:020d}.checkpoint.parquet#1", (9,)
            ),
            "renaming the ledger's last checkpoint": SystemCall(
                "ledger/_delta_log/_last_checkpoint#1", calls="rename,renameat,renameat2"
            ),
            "before the evals commit": Call("commit", "evals$", "before", (1, 2)),
            "before evaluated": Call("row", "^evaluated", "before", (2, 1)),
            "before cycle_closed": Call("row", "^cycle_closed", "before"),
            "after cycle_closed": Call("row", "^cycle_closed", "after"),
        },
    ),
    *_points(
        "trainer",
        {
            "half of a scores file": Call("open", r"scores/.*parquet$", "within", (1, 2)),
            "linking the scores commit": SystemCall("scores/" + LOG, (2, 1)),
            "after the scores commit": Call("commit", "scores$", "after", (1, 2)),
            "before the first optimizer step": Call("step", "", "before", (1, 3)),
            "between optimizer steps": Call("step", "", "after", (3, 1)),
            "half of a checkpoint's shard": Call(
                "open", r"checkpoints/.*safetensors$", "within", (1, 2)
            ),
            "fsync of a checkpoint's shard": Call(
                "fsync", r"checkpoints/.*safetensors$", "before", (2, 1)
            ),
            "half of a checkpoint's manifest": Call(
                "open", r"checkpoints/.*/[^/]*manifest[^/]*$", "within", (1, 2)
            ),
            "before a checkpoint's rename": Call("rename", "/checkpoints/", "before", (1, 2)),
            "after a checkpoint's rename": Call("rename", "/checkpoints/", "after", (2, 1)),
            "half of a steps file": Call("open", r"steps/.*parquet$", "within", (1, 2)),
            "linking the steps commit": SystemCall("steps/" + LOG, (1, 2)),
            "after the steps commit": Call("commit", "steps$", "after", (1, 2)),
        },
    ),
)

# With k = 1 both batches' groups may end in one window.
_ONLY_WINDOW = Call("row", "^rollouts_recorded", "before")

AHEAD = tuple(
    Point(
        f"k = 1: {point.name}",
        point.process,
        _ONLY_WINDOW if point.name == "before rollouts_recorded" else point.place,
    )
    for point in ON_DISK
    if point.name
    in (
        "in the middle of sampling",
        "before rollouts_recorded",
        "after batch_admitted",
        "between optimizer steps",
        "after version_published",
    )
)

BETWEEN_ANCHORS = _points(
    "controller",
    {
        "half of a patch's data": Call("open", r"weights/\..*\.patch$", "within", (2, 1)),
        "fsync of a patch's data": Call("fsync", r"weights/\..*\.patch$", "before", (1, 2)),
        "after a patch's rename": Call("rename", "/weights/", "after", (2, 3)),
        "half of a rebuilt version": Call(
            "open", r"rebuilt-weights/\..*safetensors$", "within", (2, 1)
        ),
        "before a rebuilt version's rename": Call("rename", "/rebuilt-weights/", "before", (1, 2)),
    },
)
"""Of a run whose versions 1 and 2 are patches."""

IN_A_BUCKET = (
    *_points(
        "controller",
        {
            "before a table's creation is put": Request("PUT .*/steps/_delta_log/0", "before"),
            "a table's creation is put": Request("PUT .*/scores/_delta_log/0", "answered"),
            "before a data file is put": Request(
                r"PUT .*/trajectories/.*\.parquet", "before", WINDOWS
            ),
            "half of a data file": Request(r"PUT .*/segments/.*\.parquet", "within", WINDOWS),
            "a data file is put": Request(r"PUT .*/requests/.*\.parquet", "answered", WINDOWS),
            "before a ledger commit's conditional put": Request(
                r"PUT .*/ledger/_delta_log/\d+\.json", "before", (7, 9, 12, 5, 15)
            ),
            "a ledger commit is put": Request(
                r"PUT .*/ledger/_delta_log/\d+\.json", "answered", (9, 10, 14, 6, 16)
            ),
            "the ledger's checkpoint is put": Request(
                r"PUT .*/ledger/_delta_log/\d+\.checkpoint", "answered"
            ),
            "half of an anchor's weights": Request(
                r"PUT .*/weights/.*safetensors", "within", (2, 3, 1)
            ),
            "before an anchor's manifest is put": Request(
                r"PUT .*/weights/.*manifest", "before", (2, 3, 1)
            ),
            "an anchor's manifest is put": Request(
                r"PUT .*/weights/.*manifest", "answered", (3, 1, 2)
            ),
        },
    ),
    *_points(
        "trainer",
        {
            "the scores commit is put": Request(
                r"PUT .*/scores/_delta_log/\d+[1-9]\.json", "answered", (1, 2)
            ),
            "half of a checkpoint's shard": Request(
                r"PUT .*/checkpoints/.*safetensors", "within", (1, 2)
            ),
            "before a checkpoint's manifest is put": Request(
                r"PUT .*/checkpoints/.*manifest", "before", (1, 2)
            ),
            "the steps commit is put": Request(
                r"PUT .*/steps/_delta_log/\d+[1-9]\.json", "answered", (1, 2)
            ),
        },
    ),
)
