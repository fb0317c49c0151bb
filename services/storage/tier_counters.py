"""Counters of the tiers since this process started, for the inventory."""

from __future__ import annotations

from collections.abc import Mapping

from services.storage.disk_tier import DiskTier
from services.storage.pipelines import Pipelines
from services.storage.reconciliation import Reconciliation
from services.storage.remote_tier import RemoteTier
from services.storage.uploads import Uploads
from shared.messages.pools import HIDDEN, ChunkForm


def disk_counters(disk: DiskTier) -> dict[str, int]:
    """Return counters of chunks on the disk, and of evicted ones."""
    index = disk.index
    return {
        "disk_chunks": len(index),
        "disk_bytes": index.nbytes,
        "disk_quota_bytes": index.quota,
        "disk_bytes_read": disk.pace.nbytes,
        "disk_pinned": index.pinned,
        "chunks_evicted": index.evicted,
        "chunks_quarantined": disk.quarantined,
        **{f"quarantined_{reason}": count for reason, count in disk.quarantined_by_reason.items()},
        "removals_outstanding": len(disk.removals),
    }


def remote_counters(remote: RemoteTier) -> dict[str, int]:
    """Return counters of uploads to the object store, and of its objects that failed verification or were replaced."""
    return {
        "remote_chunks_refused": remote.refused,
        "remote_chunks_replaced": remote.replaced,
        "chunks_uploaded": remote.uploaded,
        "uploads_failed": remote.upload_failures,
    }


def upload_counters(uploads: Uploads, reconciliation: Reconciliation) -> dict[str, int]:
    """Return counters of chunks of the disk still to be uploaded, or compared with the store."""
    return {
        "uploads_left_out": uploads.left_out,
        "uploads_outstanding": len(uploads),
        "reconcile_passes": reconciliation.passes,
        "reconcile_found": reconciliation.found,
        "reconcile_outstanding": len(reconciliation),
    }


def pipeline_counters(pipelines: Mapping[ChunkForm, Pipelines]) -> dict[str, int]:
    """Return counters of orders and chunks of both forms together, and how many hidden chunks are among them."""
    counters: dict[str, int] = {}
    for form, made in pipelines.items():
        for name, count in _counters_of(form, made).items():
            counters[name] = counters.get(name, 0) + count
    return counters


def _counters_of(form: ChunkForm, made: Pipelines) -> dict[str, int]:
    saves, fetches, is_hidden = made.saver.totals, made.fetcher.totals, form == HIDDEN
    counters = {
        "saves_done": saves.saves - saves.failed,
        "saves_failed": saves.failed,
        "saves_outstanding": len(made.saver),
        "chunks_saved": saves.chunks,
        "hidden_chunks_saved": saves.chunks if is_hidden else 0,
        "bytes_saved": saves.nbytes,
        "fetches_done": fetches.fetches - fetches.failed,
        "fetches_failed": fetches.failed,
        "fetches_outstanding": len(made.fetcher),
        "chunks_fetched_disk": fetches.disk_chunks,
        "chunks_fetched_remote": fetches.remote_chunks,
        "chunks_fetched_lent": fetches.lent_chunks,
        "hidden_chunks_fetched": fetches.disk_chunks + fetches.remote_chunks if is_hidden else 0,
        "bytes_fetched": fetches.nbytes,
    }
    if made.promotions is not None:
        counters |= {
            "chunks_promoted": made.promotions.promoted,
            "promotions_outstanding": len(made.promotions),
        }
    if made.sparse is not None:
        copies, reader = made.sparse.copies, made.sparse.reader
        counters |= {
            "sparse_copies_written": copies.written,
            "sparse_copies_left_out": copies.left_out,
            "sparse_copies_outstanding": len(copies),
            "sparse_reads": reader.reads,
            "sparse_reads_outstanding": len(reader),
            "sparse_bytes_read": reader.disk_bytes,
        }
    return counters
