"""Loading of LoRA adapters: a thread of its own reads them, and they are put beside the model between two steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import safetensors
import safetensors.torch

from services.worker.engine.adapters import Adapter, Adapters
from shared import logs
from shared.adapters import AdapterFiles, load_adapter
from shared.errors import AdapterRefused, ThermoclineError
from shared.messages.worker_plans import AttachAdapter, DetachAdapter

_log = logs.get_logger("worker")

Submit = Callable[[Callable[[], None]], object]


@dataclass(frozen=True, slots=True)
class AdapterBounds:
    """Bounds on a worker's adapters; ``most_bytes`` is for the weights of all of them, as float32."""

    most: int = 16
    most_rank: int = 64
    most_bytes: int = 2**30


@dataclass(frozen=True, slots=True)
class Attached:
    """Result of an order to load an adapter; ``fault`` is "" where the adapter is served now."""

    order: AttachAdapter
    fault: str = ""
    lacks_room: bool = False  # With a fault: it would be served if there were fewer others.


@dataclass(frozen=True, slots=True)
class _Read:
    """An order whose files have been read; either ``adapter`` or ``fault`` is set."""

    order: AttachAdapter
    nbytes: int = 0
    adapter: Adapter | None = None
    fault: str = ""


class AdapterLoading(Protocol):
    """Interface for the executor's orders about adapters."""

    @property
    def has_news(self) -> bool:
        """Whether :meth:`settle` has something to do; safe from any thread."""

    def attach(self, order: AttachAdapter) -> None:
        """Begin to load an adapter."""

    def detach(self, order: DetachAdapter) -> None:
        """Forget an adapter, loaded or not."""

    def settle(self) -> list[Attached]:
        """Serve the adapters that have been read; call it between two steps.

        Return the result of each order, in the order in which they ended.
        """

    def serves(self, digest: str) -> bool:
        """Return whether requests may use this adapter."""

    def close(self) -> None:
        """Load no more adapters."""


class NoAdapters:
    """Loading at a worker that serves no adapters: every order is answered with the reason."""

    def __init__(self, reason: str) -> None:
        """Give ``reason`` as the fault of every order to load an adapter."""
        self._reason = reason
        self._refused: list[Attached] = []

    @property
    def has_news(self) -> bool:
        """Whether a refusal has not been collected by :meth:`settle`."""
        return bool(self._refused)

    def attach(self, order: AttachAdapter) -> None:
        """Queue a refusal, which :meth:`settle` returns."""
        self._refused.append(Attached(order, self._reason))

    def detach(self, order: DetachAdapter) -> None:
        """Drop the queued refusals of this adapter."""
        self._refused = [each for each in self._refused if each.order.digest != order.digest]

    def settle(self) -> list[Attached]:
        """Return the refusals since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def serves(self, digest: str) -> bool:
        """Return False: no adapter is served."""
        return False

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


class WorkerAdapters:
    """Adapters of a worker that serves them.

    Used by the compute thread; files are read by ``submit``, by default in one thread of its own. Orders are bounded:
    the scheduler has at most one for each adapter of the cell, and detaches those that it gives up.
    """

    def __init__(
        self, model: Adapters, bounds: AdapterBounds, wake: Callable[[], None], submit: Submit | None = None
    ) -> None:
        """Prepare; ``wake`` is called, from any thread, when there is news."""
        self._model, self._bounds, self._wake = model, bounds, wake
        self._submit = submit
        self._thread: ThreadPoolExecutor | None = None
        self._wanted: dict[str, AttachAdapter] = {}  # By digest, until they are settled.
        self._read: deque[_Read] = deque()  # Filled by the reading thread.
        self._nbytes: dict[str, int] = {}  # Float32 bytes of each served adapter, by digest.

    @property
    def has_news(self) -> bool:
        """Whether files have been read, or could not be, since the last :meth:`settle`."""
        return bool(self._read)

    def attach(self, order: AttachAdapter) -> None:
        """Read the adapter's files in the background; the first order starts the thread."""
        self._wanted[order.digest] = order
        if self._submit is None:
            # Most workers have no adapters, so no thread is taken before the first.
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
            self._submit = self._thread.submit
        self._submit(lambda: self._read_files(order))

    def detach(self, order: DetachAdapter) -> None:
        """Take the adapter off the model; a read in flight is discarded by :meth:`settle`."""
        self._wanted.pop(order.digest, None)
        self._nbytes.pop(order.digest, None)
        self._model.drop(order.digest)

    def settle(self) -> list[Attached]:
        """Put the adapters that have been read beside the model; drop those detached meanwhile.

        Return the result of each order in the order in which the reads ended; one that does not fit, or could not be
        read, has a fault.
        """
        ended = []
        while self._read:
            read = self._read.popleft()
            if self._wanted.get(read.order.digest) is not read.order:
                continue  # It was detached meanwhile.
            del self._wanted[read.order.digest]
            attached = self._serve(read)
            _log.info(
                "adapter_refused" if attached.fault else "adapter_attached",
                digest=read.order.digest,
                path=read.order.path,
                nbytes=read.nbytes,
                reason=attached.fault,
            )
            ended.append(attached)
        return ended

    def serves(self, digest: str) -> bool:
        """Return whether the adapter is beside the model now; one still being read is not."""
        return digest in self._model

    def close(self) -> None:
        """Cancel the reads that have not begun; one under way is not awaited."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _read_files(self, order: AttachAdapter) -> None:
        try:
            self._read.append(self._prepared(order))
        except ThermoclineError as error:
            self._read.append(_Read(order, fault=error.message))
        except Exception as error:  # Every error is caught, because the order has to be answered.
            _log.exception("adapter_failed", path=order.path)
            self._read.append(_Read(order, fault=f"it could not be read: {error!r}"))
        self._wake()

    def _prepared(self, order: AttachAdapter) -> _Read:
        # Weights of half the size become as large as the bound when they are float32.
        files, weights = load_adapter(Path(order.path), self._bounds.most_bytes)
        self._check(files, order)
        try:
            tensors = safetensors.torch.load(weights)
        except safetensors.SafetensorError as error:
            raise AdapterRefused(f"its weights cannot be read: {error}") from error
        return _Read(order, files.nbytes, self._model.prepare(files, tensors))

    def _check(self, files: AdapterFiles, order: AttachAdapter) -> None:
        if files.digest != order.digest:
            raise AdapterRefused(f"the files in {order.path} have changed since it was asked for: load it again")
        if files.rank > self._bounds.most_rank:
            raise AdapterRefused(f"its rank {files.rank} is above {self._bounds.most_rank} (--max-adapter-rank)")

    def _serve(self, read: _Read) -> Attached:
        """Put an adapter beside the model, if it was read and there is room."""
        if read.adapter is None:
            return Attached(read.order, read.fault)
        fault, lacks_room = self._lack(read)
        if not fault:
            try:
                self._model.put(read.adapter)
                self._nbytes[read.order.digest] = read.nbytes
            except AdapterRefused as error:
                fault = error.message
        return Attached(read.order, fault, lacks_room)

    def _lack(self, read: _Read) -> tuple[str, bool]:
        """Return why there is no room for an adapter, or "", and whether there would be without the others."""
        # An adapter that it replaces leaves once every worker has loaded it. Its bytes are still in memory.
        others = len(self._nbytes.keys() - {read.order.replaces})
        if others >= self._bounds.most:
            return f"{self._bounds.most} adapters are loaded already (--max-adapters)", self._bounds.most > 0
        room = self._bounds.most_bytes - sum(self._nbytes.values())
        if read.nbytes > room:
            told = f"it takes {read.nbytes} bytes, and {room} of {self._bounds.most_bytes} are left (--adapter-bytes)"
            return told, read.nbytes <= self._bounds.most_bytes
        return "", False
