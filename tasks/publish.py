"""Publish a trained batch's weights: a pure function of its checkpoint and its parent.

A crash between the commit and the publication is repaired by doing it again, to the same bytes. The
trainer and the publisher both compute the root hash, from different reads, and must agree.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from schemas.config import RunConfig
from tasks.lake.ledger import Entry, Ledger
from tasks.weights import checkpoints, folders
from tasks.weights.anchors import write_anchor
from tasks.weights.folders import Publication
from tasks.weights.patch import write_patch
from tasks.weights.store import open_store
from tasks.weights.versions import drop_rebuilt, version_folder


def version_dir(config: RunConfig, uri: str) -> Path:
    """The Hugging Face folder of a version on this machine; `uri` is relative to the run's store.

    Raises `ValueError` if the store does not hold the version whole.
    """
    return version_folder(open_store(config), uri)


def relative_uri(config: RunConfig, publication: Publication) -> str:
    return str(Path(publication.uri).relative_to(open_store(config).folder))


def publish_folder(
    config: RunConfig, version: int, lease: int, write: Callable[[Path], Publication]
) -> Publication:
    """Has `write` build a version below the folder it is given, and stores it."""
    store = open_store(config)
    relative = f"weights/{folders.folder_name(version, lease)}"
    store.begin(relative)
    publication = write(store.folder / "weights")
    store.put(relative, folders.MANIFEST)
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
    """Publishes version `trained.batch` from the checkpoint that its ledger row names: as an anchor
    or as a patch on the last committed version, as `publication.anchor_every` has it.

    Raises `ValueError` if the checkpoint does not hold the values that the trainer recorded.
    """
    assert trained.batch is not None and trained.checkpoint is not None
    version, store = trained.batch, open_store(config)
    parent = ledger.last("version_published", version=version - 1)
    first = ledger.last("version_published", version=0)
    assert parent is not None and first is not None, "versions are published in order"
    checkpoint = store.get(trained.checkpoint, checkpoints.MANIFEST)
    tensors = checkpoints.published_values(checkpoint)
    parent_dir = version_dir(config, parent.details["uri"])
    if version % config.publication.anchor_every:
        write = partial(
            write_patch, version=version, lease=lease, tensors=tensors, parent_dir=parent_dir
        )
    else:
        write = partial(
            write_anchor,
            version=version,
            lease=lease,
            tensors=tensors,
            assets_dir=version_dir(config, first.details["uri"]),
            parent_uri=str(parent_dir),
        )
    publication = publish_folder(config, version, lease, write)
    if publication.root_hash != trained.root_hash:
        raise ValueError(
            f"Checkpoint {trained.checkpoint} holds root hash {publication.root_hash}, but batch "
            f"{trained.batch} was trained to {trained.root_hash}: the checkpoint was changed on "
            "disk; restore the store from a backup."
        )
    # The trainer may still audit tokens as stale as the bound, in a batch that follows this one.
    drop_rebuilt(store, before_version=version - 1 - config.asynchrony.lag_bound)
    return publication
