"""Invariants of the store: checkpoints and published weights are there and are the ones recorded.

Every value is read and hashed again, so that nothing is taken on trust from a manifest.
"""

from collections.abc import Iterator
from pathlib import Path

from tasks.invariants.finding import Invariant
from tasks.invariants.snapshot import Snapshot
from tasks.weights.anchors import read_anchor
from tasks.weights.checkpoints import published_values, read_manifest
from tasks.weights.hashing import root_hash, root_hash_of_stream


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


def checkpoint_faults(store: Path, snapshot: Snapshot) -> Iterator[str]:
    """Each trained batch's checkpoint is whole and holds the values that the batch came to."""
    for entry in snapshot.of_kind("batch_trained"):
        place = f"row {entry['seq']} (batch {entry['batch']})"
        folder = store / snapshot.run_id / entry["checkpoint"]
        try:
            batch = read_manifest(folder)["batch"]
            root = root_hash_of_stream(published_values(folder))
        except Exception as error:
            # Whatever damaged bytes make a reader say, the checkpoint is not what was written.
            yield f"{place}: {_first_line(error)}"
            continue
        if batch != entry["batch"]:
            yield f"{place}: {folder} is of batch {batch}"
        if root != entry["root_hash"]:
            yield f"{place}: {folder} holds root hash {root}, the ledger says {entry['root_hash']}"


def weight_faults(store: Path, snapshot: Snapshot) -> Iterator[str]:
    """Each published version's folder is whole and holds the values that the ledger names."""
    for entry in snapshot.of_kind("version_published"):
        place = f"row {entry['seq']} (version {entry['version']})"
        folder = store / snapshot.run_id / entry["details"]["uri"]
        try:
            root = root_hash(read_anchor(folder))
        except Exception as error:
            yield f"{place}: {_first_line(error)}"
            continue
        if root != entry["root_hash"]:
            yield f"{place}: {folder} holds root hash {root}, the ledger says {entry['root_hash']}"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


PUBLICATIONS = Invariant(
    "publications",
    lambda s: list(publication_faults(s)),
    lambda s: f"{len(s.of_kind('version_published'))} versions",
)


def store_invariants(store: Path) -> tuple[Invariant, ...]:
    """What is checked in the store at `store`, which holds a folder for each run."""
    fix = f"restore {store} from a backup; if it lies elsewhere, pass --store"
    return (
        Invariant(
            "checkpoints",
            lambda s: list(checkpoint_faults(store, s)),
            lambda s: f"{len(s.of_kind('batch_trained'))} checkpoints, every value hashed",
            fix,
        ),
        Invariant(
            "weights",
            lambda s: list(weight_faults(store, s)),
            lambda s: f"{len(s.of_kind('version_published'))} versions, every value hashed",
            fix,
        ),
    )
