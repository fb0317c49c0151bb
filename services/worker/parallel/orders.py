"""What rank 0 tells the other ranks, and what they answer. Nothing of it leaves the machine, or the group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.worker.engine.forward_meta import ForwardMeta, LayerGate, Segment, pages_for
from services.worker.proving.table import ProofTable
from shared.messages.base import Message, pack_int32
from shared.messages.pools import KvDtype, PoolHandle


class StartRank(Message, frozen=True):
    """The first order: who the rank is and what it loads. ``store_port`` is where the ranks find one another."""

    rank: int
    ranks: int
    model_dir: str
    dtype: str
    device: str
    threads: int
    page_size: int
    shm_prefix: str
    store_port: int
    timeout_ms: int
    worker_id: str = ""
    log_level: str = "info"
    first_gpu: int = 0  # That of rank 0; the others take those behind it.
    max_context_tokens: int = 0
    kv_dtype: KvDtype = "auto"


class JoinGroup(Message, frozen=True):
    """Every rank has its weights: join the collectives, and run the model once to see the shape of its KV.

    ``through_host``: without NCCL, which did not pass its proof in every rank.
    """

    through_host: bool = False


class MeasureRoom(Message, frozen=True):
    """Find out, in a step that all ranks take together, what is left on the device (``engine.gpu_room``)."""

    fraction: float
    tokens: int
    rows: int
    reserve_bytes: int


class MakePool(Message, frozen=True):
    """Make a part of ``pages`` pages, answer with its handles, then let the model answer the prompts by which rank 0
    proves it, of ``probe_tokens`` each.
    """

    pages: int
    probe_tokens: int


class RunStep(Message, frozen=True):
    """One step, see ``ModelRunner.forward``: numbers are packed int32. ``rows`` and ``contexts`` have an entry for each
    segment, ``pages`` its page table, ``running`` the slot of its layers' states (none where no layer has any). If it
    ``waits``, a layer's attention waits for ``LayersLanded``.
    """

    number: int
    ids: bytes
    positions: bytes
    last_rows: bytes
    rows: bytes
    contexts: bytes
    pages: tuple[bytes, ...]
    waits: bool = False
    running: bytes = b""


class LayersLanded(Message, frozen=True):
    """In step ``number``, the loads of the first ``layers`` layers are on all devices, or will not be used."""

    number: int
    layers: int


class ProveHidden(Message, frozen=True):
    """Find out, in a pass that all ranks take together, whether KV follows from the model's hidden states. Once at the
    most, between two steps; ``vocab_size`` is the model's.
    """

    vocab_size: int
    staging_bytes: int


class RestoreRows(Message, frozen=True):
    """Tokens ``[start, end)`` of one request come back from whole hidden pages (numbers packed int32, identities 16
    bytes each) of the pool that ``handle`` maps. ``pages`` is the request's page table, packed, ``ids`` are the tokens,
    packed, where layers are ``recomputed``, those that the hidden pages lack included. If it ``waits``, a layer's
    attention waits for ``LayersLanded``.
    """

    number: int
    handle: PoolHandle
    hidden_pages: bytes
    identities: bytes
    recomputed: int
    start: int
    end: int
    pages: bytes
    ids: bytes
    waits: bool = False


class LetGoHidden(Message, frozen=True):
    """A hidden pool is gone: unmap what was read last."""


class StopRank(Message, frozen=True):
    """There will be no more steps."""


RankOrder = (
    StartRank
    | JoinGroup
    | MeasureRoom
    | MakePool
    | ProveHidden
    | RunStep
    | RestoreRows
    | LetGoHidden
    | LayersLanded
    | StopRank
)


class RankLoaded(Message, frozen=True):
    """The rank has its weights, ``weight_bytes`` of them, and has proven what it uses of its GPU."""

    weight_bytes: int
    proofs: ProofTable = ProofTable()


class RankMeasured(Message, frozen=True):
    """Pages for which the rank's device has room."""

    pages: int


class RankReady(Message, frozen=True):
    """The rank's part of the device pool: for rank 0, and for the rest of the cell (an exported GPU handle is good for
    one taker).
    """

    for_group: PoolHandle
    for_cell: PoolHandle


class RankProven(Message, frozen=True):
    """Why this rank cannot restore KV from hidden states; "" if it can."""

    fault: str = ""


class RankFailed(Message, frozen=True):
    """The rank ends, and why. ``is_refusal``: another start would end the same way."""

    reason: str
    is_refusal: bool = False


RankAnswer = RankLoaded | RankMeasured | RankReady | RankProven | RankFailed


def step_order(
    number: int, ids: torch.Tensor, positions: torch.Tensor, meta: ForwardMeta, last_rows: torch.Tensor
) -> RunStep:
    """Return the order for a step, with no more of its page tables than it reads."""
    segments = meta.segments
    has_states = any(segment.running >= 0 for segment in segments)
    return RunStep(
        number=number,
        ids=_packed(ids),
        positions=_packed(positions),
        last_rows=_packed(last_rows),
        rows=pack_int32([segment.rows for segment in segments]),
        contexts=pack_int32([segment.context for segment in segments]),
        pages=tuple(pack_int32(one.pages[: pages_for(one.length, meta.page_size)]) for one in segments),
        waits=meta.gate is not None,
        running=pack_int32([segment.running for segment in segments]) if has_states else b"",
    )


def step_meta(order: RunStep, page_size: int, device: torch.device, gate: LayerGate | None) -> ForwardMeta:
    """Return the tables of ``order`` for attention."""
    return ForwardMeta.build(_segments(order), page_size, device, gate)


def unpacked(packed: bytes) -> torch.Tensor:
    """Numbers of an order as int64."""
    return torch.from_numpy(np.frombuffer(packed, dtype="<i4").astype(np.int64))


def _packed(numbers: torch.Tensor) -> bytes:
    return pack_int32(numbers.cpu().numpy())


def _segments(order: RunStep) -> Sequence[Segment]:
    rows, contexts = np.frombuffer(order.rows, dtype="<i4"), np.frombuffer(order.contexts, dtype="<i4")
    running = np.frombuffer(order.running, dtype="<i4") if order.running else np.full(len(rows), -1)
    return [
        Segment(int(count), int(context), np.frombuffer(pages, dtype="<i4"), int(slot))
        for count, context, pages, slot in zip(rows, contexts, order.pages, running, strict=True)
    ]
