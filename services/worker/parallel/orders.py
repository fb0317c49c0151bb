"""Orders of rank 0 to the other ranks, and their answers. They stay on the machine and within the group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.worker.engine.forward_meta import ForwardMeta, LayerGate, Segment, pages_for
from services.worker.proving.table import ProofTable
from shared.messages.base import Message, pack_int32
from shared.messages.pools import KvDtype, PoolHandle


class StartRank(Message, frozen=True):
    """The first order: which rank the process is and what it loads. ``store_port`` is where the ranks meet."""

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
    """Join the collectives, now that every rank has its weights, and run the model once to find the shape of its KV.

    ``through_host``: without NCCL, which did not pass its proof in every rank.
    """

    through_host: bool = False


class MeasureRoom(Message, frozen=True):
    """Measure, in a step that all ranks take together, the memory left on the device (``engine.gpu_room``)."""

    fraction: float
    tokens: int
    rows: int
    reserve_bytes: int


class MakePool(Message, frozen=True):
    """Make a part of ``pages`` pages, answer with its handles, then compute the prompts that prove the model.

    Rank 0 proves the model by these prompts, of ``probe_tokens`` each.
    """

    pages: int
    probe_tokens: int


class PrefixInPart(Message, frozen=True):
    """A prefix that segment ``segment`` of a step attends to in part: tokens ``[start, end)`` of its request.

    Rank 0 gives every prefix a ``number`` of its own. What layers choose lies in ``pages`` (packed int32).
    """

    number: int
    segment: int
    start: int
    end: int
    pages: bytes


class RunStep(Message, frozen=True):
    """Run one step, see ``ModelRunner.forward``: numbers are packed int32.

    ``rows`` and ``contexts`` have an entry for each segment, ``pages`` its page table, ``running`` the slot of its
    layers' states (none where no layer has any). If it ``waits``, a layer's attention waits for ``LayersLanded``. A
    layer of a prefix ``in_part`` that has not chosen waits for ``TokensChosen``; ``ended`` are prefixes whose requests
    have ended.
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
    in_part: tuple[PrefixInPart, ...] = ()
    ended: bytes = b""


class TokensChosen(Message, frozen=True):
    """In step ``number``, what ``layer`` of prefix ``prefix`` attends over: its K and V are in all parts of the pool.

    ``tokens`` are positions, packed int32: ``sets`` rows of equal length, one for every KV head of the model or one for
    all. Where the choice ``is_void`` there are none, and nothing more is chosen in this step, whose result is not used.
    """

    number: int
    prefix: int
    layer: int
    sets: int = 0
    tokens: bytes = b""
    is_void: bool = False


class LayersLanded(Message, frozen=True):
    """In step ``number``, the loads of the first ``layers`` layers are on all devices, or will not be used."""

    number: int
    layers: int


class ProveHidden(Message, frozen=True):
    """Test, in a pass that all ranks take together, whether KV follows from the model's hidden states.

    At most once, between two steps; ``vocab_size`` is the model's.
    """

    vocab_size: int
    staging_bytes: int


class RestoreRows(Message, frozen=True):
    """Restore tokens ``[start, end)`` of one request from whole hidden pages of the pool that ``handle`` maps.

    Numbers of hidden pages are packed int32, identities 16 bytes each. ``pages`` is the request's page table, packed,
    ``ids`` are the tokens, packed, where layers are ``recomputed``, those that the hidden pages lack included. If it
    ``waits``, a layer's attention waits for ``LayersLanded``.
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
    """A hidden pool has ended: unmap the one that was read last."""


class StopRank(Message, frozen=True):
    """Stop: there will be no more steps."""


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
    | TokensChosen
    | StopRank
)


class RankLoaded(Message, frozen=True):
    """The rank has its weights, ``weight_bytes`` of them, and has proven its use of its GPU."""

    weight_bytes: int
    proofs: ProofTable = ProofTable()


class RankMeasured(Message, frozen=True):
    """Pages for which the rank's device has room."""

    pages: int


class RankReady(Message, frozen=True):
    """The rank's part of the device pool: for rank 0, and for the rest of the cell.

    An exported GPU handle is good for one taker.
    """

    for_group: PoolHandle
    for_cell: PoolHandle


class RankProven(Message, frozen=True):
    """The reason why this rank cannot restore KV from hidden states; "" if it can."""

    fault: str = ""


class RankFailed(Message, frozen=True):
    """The rank ends, for this reason. ``is_refusal``: another start would end the same way."""

    reason: str
    is_refusal: bool = False


RankAnswer = RankLoaded | RankMeasured | RankReady | RankProven | RankFailed


def step_order(
    number: int,
    ids: torch.Tensor,
    positions: torch.Tensor,
    meta: ForwardMeta,
    last_rows: torch.Tensor,
    *,
    in_part: tuple[PrefixInPart, ...] = (),
    ended: Sequence[int] = (),
) -> RunStep:
    """Return the order for a step, with no more of its page tables than it reads.

    ``in_part`` are prefixes that it attends to in part, ``ended`` the numbers of those that have ended.
    """
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
        in_part=in_part,
        ended=pack_int32(ended),
    )


def step_meta(order: RunStep, page_size: int, device: torch.device, gate: LayerGate | None) -> ForwardMeta:
    """Return the tables of ``order`` for attention."""
    return ForwardMeta.build(_segments(order), page_size, device, gate)


def unpacked(packed: bytes) -> torch.Tensor:
    """Return the numbers of an order, packed int32, as int64."""
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
