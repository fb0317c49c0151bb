"""Backups that a worker copies itself. A storage calls ``rpc.worker.<id>.store`` of a worker on a GPU of its node."""

from __future__ import annotations

from shared.messages.base import Message


class StorePages(Message, frozen=True):
    """Copy pages of the worker's device pool to pages of a host pool that the worker has mapped.

    Both lists are packed int32 of equal length, and no host page is named twice; with empty ones the call only asks
    whether the worker can do this. ``pool`` is the name of the host pool's segment: no other pool of that storage is
    written to. A call with the ``storage_incarnation``, ``transfer_id`` and ``part`` of an earlier one repeats it and
    gets its answer.
    """

    worker_incarnation: str
    storage_id: str
    storage_incarnation: str
    pool: str
    transfer_id: int = 0
    part: int = 0
    device_pages: bytes = b""
    host_pages: bytes = b""


class PagesStored(Message, frozen=True):
    """Answer: every byte is in host memory, and nothing is being written there any more.

    The latter also holds for failures: ``refused`` is why the worker cannot copy and has not begun; ``error`` is why it
    failed, so that the contents of the host pages are undefined.
    """

    refused: str = ""
    error: str = ""
    seconds: float = 0.0  # Duration of the copy, without the wait for its turn.
