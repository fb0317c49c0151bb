"""Restoration of a prefix's KV layer by layer: transmission of the next layers beside computation of this one.

See HCache section 3.1, figure 5. The transfer thread brings hidden states to staging buffers, then loads the layers
that are restored as KV. The computing thread recomputes the first layers, and projects each hidden layer when it is
first waited for: at the gate, where the attention of the request's own prompt asks for it, so that layer l waits for
layer l alone and the model's computation between two layers hides transmission too. A failure closes the gate; the
prefix's pages are then undefined and the prefix is to be recomputed.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol

import torch

from services.worker.engine import forward_meta
from services.worker.engine.forward_meta import Segment
from services.worker.kv.layer_gate import LayerGate, LoadRejected
from services.worker.kv.loads import JOIN_TIMEOUT_S
from services.worker.kv.movers.protocol import Fence
from services.worker.kv.movers.side_stream import side_stream
from services.worker.restore.first_layers import PassRunner, compute_first_layers
from services.worker.restore.hidden_source import HiddenSource
from services.worker.restore.kv_slots import KvSlots
from services.worker.restore.kv_source import KvSource
from services.worker.restore.layer_mix import LayerMix
from services.worker.restore.projection import KvProjection
from services.worker.restore.refusals import HiddenStatesUnsupported
from services.worker.restore.staging import Staging, StagingMemory
from shared.errors import InvariantViolated, TransportError


class RestorationStuck(TransportError):
    """A transfer that does not end, so that its target memory cannot be used again."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of the layers of a mix; None for means that it does not use."""

    hidden: HiddenSource | None = None
    kv: KvSource | None = None
    ids: torch.Tensor | None = None  # int64 [tokens], for recomputation.


class Gather(Protocol):
    """Joins the shards of a layer that several processes have read."""

    def whole(self, shard: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the hidden states of all ``tokens`` from those of this process, [rows, hidden]."""


class Restoration:
    """The restoration of one prefix, the tokens of ``segment``.

    A layer gate for the step that needs it, made for one use. ``run`` is for the transfer thread, all else for the
    computing thread: :meth:`begin`, then :meth:`wait` for every layer (by a step, or by :meth:`wait_all`), then
    :meth:`finish` in any case.
    """

    def __init__(
        self,
        runner: PassRunner,
        projection: KvProjection | None,
        segment: Segment,
        mix: LayerMix,
        sources: Sources,
        *,
        staging: StagingMemory | None,
        timeout_s: float,
        loads: forward_meta.LayerGate | None = None,
        gather: Gather | None = None,
    ) -> None:
        """Prepare.

        KV that recomputed layers of the segment attend to must be on the device, or come there before ``loads`` lets
        them. No other restoration may be using ``staging``. A mix without hidden states needs neither that nor a
        projection. With ``gather`` the source of hidden states is a shard of the tokens.
        """
        _check(runner, segment, mix, sources, is_shard=gather is not None)
        self._gather = gather
        self._runner, self._projection, self._segment, self._loads = runner, projection, segment, loads
        self._mix, self._sources, self._timeout_s = mix, sources, timeout_s
        device = runner.pool.device
        self._slots = KvSlots.of_segment(segment, runner.geometry.page_size, device)
        self._embeddings: tuple[torch.Tensor, ...] | None = None
        self._staging: Staging | None = None
        if mix.from_hidden:
            if projection is None or staging is None:
                raise HiddenStatesUnsupported("this worker cannot restore KV from hidden states")
            self._embeddings = projection.position_embeddings(torch.arange(segment.context, segment.length))
            assert sources.hidden is not None
            self._staging = staging.buffers(projection.shape, sources.hidden.tokens, mix.from_hidden)
        self._stream = side_stream(device)
        self._gate = LayerGate(timeout_s=timeout_s, clock_ns=time.monotonic_ns)
        self._projected = 0  # Number of hidden layers that the computing thread has finished.
        self._cancelled = threading.Event()
        self._ended = threading.Event()

    def run(self) -> None:
        """Transmit layer after layer; never raises."""
        try:
            self._transmit()
        except Exception as error:
            self._gate.reject(f"{type(error).__name__}: {error}")
        finally:
            try:
                self._stream.drain()
                if self._sources.kv is not None:
                    self._sources.kv.drain()
            except Exception as error:  # An error of the device: none of its copies can be relied on.
                self._gate.reject(f"{type(error).__name__}: {error}")
            self._ended.set()

    def begin(self) -> None:
        """Recompute the first layers."""
        if self._mix.recomputed:
            assert self._sources.ids is not None
            compute_first_layers(self._runner, self._sources.ids, self._segment, self._mix.recomputed, self._loads)
        if self._mix.recomputed == self._mix.layers:
            # Here, not in the transfer thread, which may not have run yet when all is done.
            self._gate.release(self._mix.layers - 1)

    def wait(self, layer: int) -> None:
        """Return when the KV of ``layer`` is in the pool, or ordered before what the current stream does next.

        Raises LoadRejected when anything failed or took too long.
        """
        hidden = self._mix.hidden_layers
        while self._projected < len(hidden) and hidden[self._projected] <= layer:
            self._project(hidden[self._projected])
        if self._mix.means(layer) == "load":
            self._gate.wait(layer)
        elif self._gate.rejected is not None:
            raise LoadRejected(self._gate.rejected)

    def wait_all(self) -> None:
        """Restore every layer now, for a caller that has no step to run meanwhile. Raises as :meth:`wait` does."""
        for layer in range(self._mix.layers):
            self.wait(layer)

    @property
    def rejected(self) -> str | None:
        """Why the restoration failed, or None."""
        return self._gate.rejected

    def finish(self) -> None:
        """Return when nothing is being written any more; cancels what has not arrived.

        Raises LoadRejected if the prefix is not restored whole, RestorationStuck if the transfer does not end.
        """
        is_whole = self._gate.rejected is None and self._gate.progress[0] >= self._mix.layers
        is_whole = is_whole and self._projected == self._mix.from_hidden
        self._cancelled.set()
        if self._staging is not None:
            for _ in range(self._mix.from_hidden):
                self._staging.wake()
        if not self._ended.wait(JOIN_TIMEOUT_S):
            raise RestorationStuck("a restoration does not end; its device pages cannot be used again")
        if self._gate.rejected is not None or not is_whole:
            raise LoadRejected(self._gate.rejected or "the restoration was given up")

    def _project(self, layer: int) -> None:
        assert self._projection is not None
        assert self._staging is not None
        self._gate.wait(layer)
        hidden = self._staging.buffer(self._projected)
        if self._gather is not None:
            hidden = self._gather.whole(hidden, self._segment.rows)
        self._projection.restore(layer, hidden, self._embeddings, self._slots)
        self._staging.give_back(self._projected)
        self._projected += 1

    def _transmit(self) -> None:
        """Launch each layer, then release the one before it when it has arrived, so that the link never idles."""
        launched: tuple[int, Fence] | None = None
        for layer in range(self._mix.recomputed, self._mix.layers):
            # A buffer may become free only when the layer before has been seen to arrive.
            if launched is not None and self._mix.means(layer) == "hidden":
                launched = self._release_before_staging(launched)
            fence = self._launch(layer)
            if launched is not None:
                self._release(*launched)
            launched = None
            if fence is None:
                self._gate.release(layer)
            else:
                launched = layer, fence
        if launched is not None:
            self._release(*launched)

    def _release_before_staging(self, launched: tuple[int, Fence]) -> tuple[int, Fence] | None:
        assert self._staging is not None
        if self._staging.has_free:
            return launched
        self._release(*launched)
        return None

    def _release(self, layer: int, fence: Fence) -> None:
        fence.synchronize()
        self._gate.release(layer)

    def _launch(self, layer: int) -> Fence | None:
        if self._cancelled.is_set():
            raise TransportError("the restoration was given up")
        if self._mix.means(layer) == "load":
            assert self._sources.kv is not None
            self._sources.kv.load(layer)
            return self._sources.kv.fence()
        assert self._sources.hidden is not None
        assert self._staging is not None
        with self._stream:
            into = self._staging.take(self._timeout_s)
            if self._cancelled.is_set():
                raise TransportError("the restoration was given up")
            self._sources.hidden.read(layer, 0, self._sources.hidden.tokens, into)
            return self._stream.fence()


def _check(runner: PassRunner, segment: Segment, mix: LayerMix, sources: Sources, *, is_shard: bool) -> None:
    if mix.layers != runner.geometry.layers:
        raise InvariantViolated(f"{mix} does not restore {runner.geometry.layers} layers")
    if mix.recomputed and (sources.ids is None or len(sources.ids) != segment.rows):
        raise InvariantViolated(f"{segment.rows} tokens are to be recomputed and are not given")
    if mix.from_hidden and (sources.hidden is None or not (is_shard or sources.hidden.tokens == segment.rows)):
        raise InvariantViolated(f"hidden states of {segment.rows} tokens are to be restored and are not given")
    if mix.loaded and sources.kv is None:
        raise InvariantViolated(f"{mix.loaded} layers are to be loaded and no KV is given")
