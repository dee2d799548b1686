"""Invariants of the store: checkpoints and published weights are there and are the ones recorded.

Every value is read and hashed again, so that nothing is taken on trust from a manifest.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tasks.invariants.finding import Invariant
from tasks.invariants.snapshot import Snapshot
from tasks.storage import LocalStorage, Storage
from tasks.storage.s3 import S3Storage
from tasks.weights import checkpoints
from tasks.weights.hashing import root_hash_of_stream
from tasks.weights.store import BucketStore, DiskStore, RunStore
from tasks.weights.versions import verify


def publication_faults(snapshot: Snapshot) -> Iterator[str]:
    """Each version_published row has its publications row, with the root hash that training the
    batch came to."""
    rows = snapshot.connection.execute(
        "SELECT version, list(root_hash), list(uri) FROM publications GROUP BY version"
    ).fetchall()
    published = {version: (roots, uris) for version, roots, uris in rows}
    trained = {entry["batch"]: entry["root_hash"] for entry in snapshot.of_kind("batch_trained")}
    for entry in snapshot.of_kind("version_published"):
        version, root = entry["version"], entry["root_hash"]
        roots, uris = published.pop(version, ([], []))
        place = f"row {entry['seq']} (version {version})"
        if len(roots) != 1:
            yield f"{place} has {len(roots)} publications rows"
        elif roots != [root] or uris != [entry["details"].get("uri")]:
            yield f"{place} and its publications row name other weights: {root}, {roots[0]}"
        if version in trained and trained[version] != root:
            yield f"{place} published {root}, but batch {version} was trained to {trained[version]}"
    for version in published:
        yield f"publications: version {version} has no version_published row"


@contextmanager
def _opened(store: Storage) -> Iterator[RunStore]:
    """A run's store with an empty cache: of a bucket, fresh copies and no older ones."""
    with TemporaryDirectory() as cache:
        if isinstance(store, LocalStorage):
            yield DiskStore(store.root, Path(cache))
        else:
            assert isinstance(store, S3Storage)
            yield BucketStore(store, Path(cache))


def _kept(snapshot: Snapshot) -> list[dict[str, Any]]:
    """The batch_trained rows whose checkpoint did not expire; the newest never does, and none
    whose version is still to be published."""
    trained = snapshot.of_kind("batch_trained")
    published = {entry["version"] for entry in snapshot.of_kind("version_published")}
    return [
        entry
        for entry in trained
        if entry["checkpoint"] not in snapshot.expired_checkpoints
        or entry is trained[-1]
        or entry["batch"] not in published
    ]


def checkpoint_faults(store: Storage, snapshot: Snapshot) -> Iterator[str]:
    """Each trained batch's checkpoint is whole and unchanged, moments included, and its masters are
    the values that the batch came to; but for those that a policy let go."""
    run = store.child(snapshot.run_id)
    for entry in _kept(snapshot):
        place = f"row {entry['seq']} (batch {entry['batch']})"
        try:
            with _opened(run) as opened:
                folder = opened.get(entry["checkpoint"], checkpoints.MANIFEST)
                manifest = checkpoints.read_manifest(folder)
                for name in checkpoints.changed_files(folder, manifest):
                    yield f"{place}: {entry['checkpoint']}/{name} was changed: its hash is another"
                root = root_hash_of_stream(checkpoints.published_values(folder))
        except Exception as error:
            # Whatever damaged bytes make a reader say, the checkpoint is not what was written.
            yield f"{place}: {_first_line(error)}"
            continue
        if manifest["batch"] != entry["batch"]:
            yield f"{place}: {entry['checkpoint']} is of batch {manifest['batch']}"
        if root != entry["root_hash"]:
            yield f"{place}: {entry['checkpoint']} holds root hash {root}, not the ledger's"


def weight_faults(store: Storage, snapshot: Snapshot) -> Iterator[str]:
    """Each published version is whole, or comes whole of an anchor and its patches, and holds the
    values that the ledger names."""
    run = store.child(snapshot.run_id)
    for entries in _by_anchor(snapshot):
        # An anchor in a bucket is copied once for all that is rebuilt from it.
        with _opened(run) as opened:
            found = verify(opened, [entry["details"]["uri"] for entry in entries])
            for entry, held in zip(entries, found, strict=True):
                place = f"row {entry['seq']} (version {entry['version']})"
                if held.fault is not None:
                    yield f"{place}: {held.fault}"
                elif held.root_hash != entry["root_hash"]:
                    yield f"{place}: {held.uri} holds root hash {held.root_hash}, not the ledger's"


def _by_anchor(snapshot: Snapshot) -> list[list[Any]]:
    """The version_published rows, each anchor with the patches that follow it."""
    rows = snapshot.connection.execute(
        "SELECT version FROM publications WHERE kind = 'anchor'"
    ).fetchall()
    anchors = {version for (version,) in rows}
    groups: list[list[Any]] = []
    for entry in snapshot.of_kind("version_published"):
        if not groups or entry["version"] in anchors:
            groups.append([])
        groups[-1].append(entry)
    return groups


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _checked(snapshot: Snapshot) -> str:
    kept = len(_kept(snapshot))
    expired = len(snapshot.of_kind("batch_trained")) - kept
    return f"{kept} checkpoints, every byte hashed" + (f"; {expired} expired" if expired else "")


PUBLICATIONS = Invariant(
    "publications",
    lambda s: list(publication_faults(s)),
    lambda s: f"{len(s.of_kind('version_published'))} versions",
)


def store_invariants(store: Storage) -> tuple[Invariant, ...]:
    """What is checked in `store`, which holds a folder for each run."""
    fix = f"restore {store.uri} from a backup; if it lies elsewhere, pass --store"
    return (
        Invariant(
            "checkpoints",
            lambda s: list(checkpoint_faults(store, s)),
            _checked,
            fix,
        ),
        Invariant(
            "weights",
            lambda s: list(weight_faults(store, s)),
            lambda s: f"{len(s.of_kind('version_published'))} versions, every value hashed",
            fix,
        ),
    )
