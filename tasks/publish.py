"""Publish a trained batch's weights: a pure function of its checkpoint.

A crash between the commit and the publication is repaired by doing it again, to the same bytes. The
trainer and the publisher both compute the root hash, from different reads, and must agree.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from schemas.config import RunConfig
from tasks.lake.ledger import Entry, Ledger
from tasks.weights import anchors, checkpoints
from tasks.weights.anchors import Publication
from tasks.weights.store import open_store


def version_dir(config: RunConfig, uri: str) -> Path:
    """The folder of a publication on this machine; `uri` is relative to the run's store."""
    return open_store(config).get(uri, anchors.MANIFEST)


def relative_uri(config: RunConfig, publication: Publication) -> str:
    return str(Path(publication.uri).relative_to(open_store(config).folder))


def publish_anchor(
    config: RunConfig, version: int, lease: int, write: Callable[[Path], Publication]
) -> Publication:
    """Has `write` build a version below the folder it is given, and stores it."""
    store = open_store(config)
    relative = f"weights/{anchors.anchor_name(version, lease)}"
    store.begin(relative)
    publication = write(store.folder / "weights")
    store.put(relative, anchors.MANIFEST)
    return publication


def publication_row(config: RunConfig, publication: Publication) -> dict[str, Any]:
    return {
        "version": publication.version,
        "parent": publication.parent,
        "kind": publication.kind,
        "uri": relative_uri(config, publication),
        "bytes": publication.bytes,
        "num_changed": publication.num_changed,
        "num_parameters": publication.num_parameters,
        "root_hash": publication.root_hash,
        "seconds": publication.seconds,
    }


def publish_version(config: RunConfig, ledger: Ledger, trained: Entry, lease: int) -> Publication:
    """Publishes version `trained.batch` from the checkpoint that its ledger row names.

    Raises `ValueError` if the checkpoint does not hold the values that the trainer recorded.
    """
    assert trained.batch is not None and trained.checkpoint is not None
    parent = ledger.last("version_published", version=trained.batch - 1)
    first = ledger.last("version_published", version=0)
    assert parent is not None and first is not None, "versions are published in order"
    checkpoint = open_store(config).get(trained.checkpoint, checkpoints.MANIFEST)
    write = partial(
        anchors.write_anchor,
        version=trained.batch,
        lease=lease,
        tensors=checkpoints.published_values(checkpoint),
        assets_dir=version_dir(config, first.details["uri"]),
        parent_uri=str(version_dir(config, parent.details["uri"])),
    )
    publication = publish_anchor(config, trained.batch, lease, write)
    if publication.root_hash != trained.root_hash:
        raise ValueError(
            f"Checkpoint {trained.checkpoint} holds root hash {publication.root_hash}, but batch "
            f"{trained.batch} was trained to {trained.root_hash}: the checkpoint was changed on "
            "disk; restore the store from a backup."
        )
    return publication
