"""The proofs themselves: what is right passes, and faults that would answer wrongly are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from services.worker.engine.forward_meta import Segment
from services.worker.engine.torch_attention import page_tables, torch_attention
from services.worker.engine.unread_tokens import Following, UnreadTokens, behind_all
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.movers import make_mover
from services.worker.kv.movers.protocol import PageMover
from services.worker.kv.page_memory import PageMemory, PageNumbers
from services.worker.kv.row_checks import RowChecks
from services.worker.parallel.collectives import make_store
from services.worker.proving import ahead_proofs, attention_proofs, cases, memory_proofs, parts
from services.worker.proving.ahead_proofs import prove_ahead
from services.worker.proving.attention_proofs import prove_attention, prove_torch_attention
from services.worker.proving.cases import SHARED_TOKENS, Step, steps
from services.worker.proving.device import proofs_of
from services.worker.proving.memory_proofs import prove_mover
from services.worker.proving.part import Part, Way, WrongResult
from services.worker.proving.table import HeadsShape, LatentsShape, ProofTable, ServedShape, Speed
from shared.memory import unlink_all
from shared.messages.pools import FLOAT8, KvGeometry

INTERPRETED = "tests.unit.worker.proving.interpreted_parts"

CPU = torch.device("cpu")
SHAPE = ServedShape(
    device="cpu",
    geometry=KvGeometry(layers=2, kv_heads=2, head_dim=16, page_size=16, dtype="float32"),
    query_heads=4,
    windows=(0, 64),
)


ROUNDED = msgspec.structs.replace(
    SHAPE, geometry=msgspec.structs.replace(SHAPE.geometry, dtype=FLOAT8), dtype="float32"
)


@pytest.fixture(autouse=True, scope="module")
def _no_segments_left() -> Iterator[None]:
    yield
    unlink_all("thermocline-proof")


ATTENDING = tuple(
    part
    for part in parts.parts_of()
    if part.name in (parts.TRITON, parts.ATTENTION, parts.KV_WRITE, parts.FUSED, parts.GRAPHS)
)


def _interpreted(name: str, shape: ServedShape = SHAPE, *, names: Sequence[str] = ()) -> ProofTable:
    """The table of a list of parts of that module, by a process in which Triton interprets. Of parts with these
    ``names`` the parent knows no more: it never calls a proof.
    """
    listed = {"PARTS": tuple(part for part in parts.parts_of() if part.name != parts.IPC), "ATTENDING": ATTENDING}
    named = tuple(Part(each, (Way("wrong", lambda shape: None), Way("none"))) for each in names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        # Interpreting takes a hundred times as long as a GPU does, and more beside other tests.
        patch.setattr("services.worker.proving.choosing.WAY_SECONDS", 600.0)
        return proofs_of(shape, named or listed[name], f"{INTERPRETED}:{name}")


@pytest.fixture(scope="module")
def interpreted() -> ProofTable:
    return _interpreted("PARTS")


@pytest.mark.parametrize(
    ("part", "way"),
    [
        (parts.TRITON, "compiled"),
        (parts.ATTENTION, "triton"),
        (parts.KV_WRITE, "triton"),
        (parts.FUSED, "fused"),
        (parts.GRAPHS, "graphs"),
        (parts.AHEAD, "ahead"),
        (parts.REGISTRATION, "registered"),
        (parts.CHECKSUMS, "on the device"),
        (parts.MOVER, "gpu_assisted"),
    ],
)
def test_every_kernel_of_a_worker_passes_its_proof(interpreted: ProofTable, part: str, way: str) -> None:
    """In Triton's interpreter, through the process that a worker starts. FlashInfer is not for such heads."""
    assert interpreted.way(part) == way
    assert [each.way for each in interpreted.lost() if not each.is_absent] == []
    assert [each.way for each in interpreted.lost()] == [parts.FLASHINFER]


def test_every_kernel_passes_its_proof_over_rounded_kv() -> None:
    """The same with K and V of eight bits, which FlashInfer does not read."""
    table = _interpreted("PARTS", ROUNDED)

    assert [each.way for each in table.lost()] == [parts.FLASHINFER]
    assert table.way(parts.ATTENTION) == "triton"
    assert table.way(parts.FUSED) == "fused"
    assert table.way(parts.MOVER) == "gpu_assisted"


def test_attention_in_torch_reads_rounded_kv() -> None:
    """What serves where no kernel does."""
    prove_torch_attention(ROUNDED)


UNLIKE = msgspec.structs.replace(
    SHAPE,
    geometry=KvGeometry(layers=2, kv_heads=1, head_dim=40, page_size=16, dtype="float32"),
    windows=(0,),
    heads=(HeadsShape(query_heads=4, kv_heads=2, head_dim=16, row_values=40),),
    latents=(LatentsShape(query_heads=3, rank=24, rope=8, row_values=40),),
)
"""Pages that hold latents of some layers, and K and V of others."""


def test_layers_that_are_not_alike_pass_their_proofs() -> None:
    """Each kind is attended to, written and captured; what is for layers that are alike is not there, and no fault."""
    table = _interpreted("ATTENDING", UNLIKE)

    ways = {proof.part: proof.way for proof in table.proofs}
    assert ways == {
        parts.TRITON: "compiled",
        parts.ATTENTION: "triton",
        parts.KV_WRITE: "triton",
        parts.FUSED: "separate",
        parts.GRAPHS: "graphs",
    }
    assert [(each.way, each.is_absent) for each in table.lost()] == [(parts.FLASHINFER, True), ("fused", True)]


@pytest.mark.parametrize("shape", [UNLIKE, msgspec.structs.replace(UNLIKE, heads=())], ids=["both", "latents alone"])
def test_attention_in_torch_reads_layers_that_are_not_alike(shape: ServedShape) -> None:
    """K and V of some heads, and latents, in rows that are wider than they are."""
    prove_torch_attention(shape)


def test_attention_to_latents_that_is_wrong_is_found() -> None:
    """Values that are not the first part of a row, and a backend that knows no latents."""

    def attend(step: Step, **settings: Any) -> torch.Tensor:
        tables = page_tables(step.segments, UNLIKE.geometry.page_size, step.q.device)
        return torch_attention(step.q, step.k, step.v, step.segments, tables, **settings)

    def last_part(step: Step, rank: int, **settings: Any) -> torch.Tensor:
        return attend(dataclasses.replace(step, v=step.k), **settings)[..., -rank:]

    with pytest.raises(WrongResult, match="attention to latents of"):
        prove_attention(UNLIKE, attend, last_part)
    with pytest.raises(WrongResult, match="it attends to no latents"):
        prove_attention(UNLIKE, attend)


def test_all_movers_are_proven(interpreted: ProofTable) -> None:
    """Because settings choose among them."""
    assert interpreted.passed(parts.MOVER) == ("gpu_assisted", "batched", "per_page")


def test_what_is_plausible_and_wrong_is_found() -> None:
    """A window that is not applied; one head of one row; a graph that repeats nothing, whose outputs are cleared before
    it is replayed and whose inputs are others.
    """
    table = _interpreted("WRONG", names=["_without_window", "_without_row", "_stale_graphs"])

    faults = {each.part: each.fault for each in table.lost()}
    assert faults["_without_window"].startswith(
        "WrongResult: attention of [(1, 0), (1, 511), (1, 1300), (1, 2)] (rows, context) with"
    )
    assert "16 of 256 values differ" in faults["_without_row"]
    assert faults["_stale_graphs"].startswith("WrongResult: a replayed graph of attention")


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim", "page_size", "softcap"),
    [
        ("float32", 4, 2, 16, 16, 30.0),
        ("float32", 3, 3, 80, 1, 0.0),
        ("float16", 3, 3, 80, 1, 30.0),
        ("bfloat16", 8, 1, 32, 64, 0.0),
    ],
)
def test_attention_in_torch_is_right(
    dtype: str, heads: int, kv_heads: int, head_dim: int, page_size: int, softcap: float
) -> None:
    """With groups of query heads, windows and soft caps, in every data type, at every page size."""
    geometry = KvGeometry(layers=2, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype)

    prove_torch_attention(
        ServedShape(device="cpu", geometry=geometry, query_heads=heads, windows=(0, 64), softcap=softcap)
    )


OTHER_LAYERS = msgspec.structs.replace(SHAPE, chunks=(60,), has_sinks=True)


def test_attention_in_torch_has_chunks_and_sinks() -> None:
    """Each kind of layer is proven with sinks and without."""
    prove_torch_attention(OTHER_LAYERS)


@pytest.mark.parametrize(("ignored", "told"), [("sinks", "window none and sinks"), ("chunk", "chunks of 60")])
def test_what_attention_ignores_is_found(ignored: str, told: str) -> None:
    """A backend that knows no sinks, or no chunks, does not pass for a model that has them."""

    def attend(step: Step, **settings: Any) -> torch.Tensor:
        tables = page_tables(step.segments, SHAPE.geometry.page_size, step.q.device)
        return torch_attention(step.q, step.k, step.v, step.segments, tables, **{**settings, ignored: None})

    with pytest.raises(WrongResult, match=f"with {told}: "):
        prove_attention(OTHER_LAYERS, attend)


def test_attention_in_torch_does_not_depend_on_how_many_rows_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of long prompts are made in pieces."""
    monkeypatch.setattr("services.worker.engine.torch_attention.MOST_SCORES", 1000)

    prove_torch_attention(SHAPE)


def test_attention_that_reads_behind_the_last_token_is_found() -> None:
    """Slots without a token are no numbers."""

    def attend(step: Step, **settings: Any) -> torch.Tensor:
        further = tuple(
            Segment(each.rows, each.context + 1, np.append(each.pages, each.pages[-1:])) for each in step.segments
        )
        tables = page_tables(further, SHAPE.geometry.page_size, step.q.device)
        return torch_attention(step.q, step.k, step.v, further, tables, **settings)

    with pytest.raises(WrongResult, match="by up to inf"):
        prove_attention(SHAPE, attend)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything takes a second."""

    def seconds_of(work: Callable[[], object], device: str, *, rounds: int = 5) -> float:
        work()
        return 1.0

    for module in (attention_proofs, memory_proofs):
        monkeypatch.setattr(module, "is_timed", lambda _: True)
    monkeypatch.setattr(cases, "seconds_of", seconds_of)


@pytest.mark.usefixtures("timed")
def test_speeds_are_bytes_of_what_was_moved_or_read() -> None:
    """K and V of decode; the pages of a load."""
    row_bytes = 2 * 16 * 4
    windowed = msgspec.structs.replace(SHAPE, windows=(64,))

    for shape in (SHAPE, windowed):
        assert prove_torch_attention(shape) == Speed(value=2 * 16 * 2048 * row_bytes / 1e9, unit="GB/s")
    moved = 16 * 2**20 // SHAPE.geometry.page_bytes * SHAPE.geometry.page_bytes
    for name in ("batched", "per_page"):
        assert prove_mover(name, SHAPE) == Speed(value=moved / 1e9, unit="GB/s")


def test_requests_that_share_a_prefix_share_its_pages() -> None:
    """As they do after a match in the radix tree."""
    *_, shared = steps(SHAPE)

    tables = [segment.pages[: SHARED_TOKENS // SHAPE.geometry.page_size].tolist() for segment in shared.segments]
    assert all(each == tables[0] for each in tables)
    own = [page for segment in shared.segments for page in segment.pages[len(tables[0]) :].tolist()]
    assert len(own) == len(set(own))
    assert not set(own) & set(tables[0])


class FaultyMover:
    """A mover that does all but one thing right."""

    name: Any = "batched"

    def __init__(self, inner: PageMover, fault: str) -> None:
        self._inner, self._fault = inner, fault
        self.piece_pages = inner.piece_pages

    def load(
        self,
        source: PageMemory,
        layers: range,
        pages: PageNumbers,
        device_pages: PageNumbers,
        checks: RowChecks | None = None,
    ) -> Any:
        if self._fault == "layer":
            layers = layers[:-1]
        if self._fault == "page":
            device_pages = np.roll(device_pages, 1)
        found: Any = self._inner.load(source, layers, pages, device_pages, None if self._fault == "checks" else checks)
        return found

    def store(self, target: PageMemory, layers: range, device_pages: PageNumbers, pages: PageNumbers) -> None:
        self._inner.store(target, layers, device_pages, pages)
        if self._fault == "store":
            target.host_rows()[pages[0], 0, 1, -1] ^= 1
        if self._fault == "beyond":
            other = next(page for page in range(13) if page not in pages)
            target.host_rows()[other, 0, 0, 0] ^= 1

    def fence(self) -> Any:
        return self._inner.fence()

    def drain(self) -> None:
        self._inner.drain()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("layer", "fail their checks|loaded pages differ"),
        ("page", "loaded pages differ"),
        ("checks", r"\[\] fail their checks, not \[2\]"),
        ("store", "stored pages differ"),
        ("beyond", "other pages"),
    ],
)
def test_a_mover_with_one_fault_is_found(fault: str, reason: str) -> None:
    """A layer left out, pages exchanged, checksums not looked at, a byte stored wrongly, one written elsewhere."""

    def made(pool: DevicePool) -> FaultyMover:
        return FaultyMover(make_mover(pool, "batched", programs=1), fault)

    with pytest.raises(WrongResult, match=reason):
        prove_mover("batched", SHAPE, made)


def test_ranks_prove_their_collectives_together() -> None:
    """Two processes that prove meet in a group of their own, beside the store's own group."""
    store = make_store(60.0)
    shapes = [msgspec.structs.replace(SHAPE, rank=rank, ranks=2, store_port=store.port) for rank in range(2)]

    with ThreadPoolExecutor(2) as threads:
        tables = list(threads.map(lambda shape: proofs_of(shape, parts.PARTS[:1]), shapes))

    assert [table.way(parts.COLLECTIVES) for table in tables] == ["nccl", "nccl"]
    assert [list(table.lost()) for table in tables] == [[], []]


def test_a_rank_that_is_alone_goes_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is waited for longer than the limit of one way."""
    monkeypatch.setattr("services.worker.proving.choosing.WAY_SECONDS", 4.0)
    store = make_store(60.0)

    table = proofs_of(msgspec.structs.replace(SHAPE, ranks=2, store_port=store.port), parts.PARTS[:1])

    assert table.way(parts.COLLECTIVES) == "through the host"
    assert next(table.lost()).fault == "no answer within 4 s"


def test_on_a_machine_without_a_gpu_the_last_ways_pass() -> None:
    """The real list, tried on a CPU: what serves there is what needs nothing of CUDA."""
    table = proofs_of(SHAPE, parts.parts_of())

    assert {proof.part: proof.way for proof in table.proofs} == {
        parts.TRITON: "none",
        parts.ATTENTION: "torch",
        parts.KV_WRITE: "torch",
        parts.FUSED: "separate",
        parts.GRAPHS: "eager",
        parts.AHEAD: "one by one",
        parts.REGISTRATION: "staged",
        parts.CHECKSUMS: "on the host",
        parts.MOVER: "batched",
        parts.IPC: "none",
    }


def test_a_group_has_parts_of_its_own() -> None:
    """It needs CUDA IPC, has no graphs, and proves collectives first."""
    group, alone, eager = parts.parts_of(ranks=2), parts.parts_of(), parts.parts_of(has_graphs=False)

    assert [part.name for part in group] == [
        parts.COLLECTIVES, parts.TRITON, parts.ATTENTION, parts.REGISTRATION, parts.CHECKSUMS, parts.MOVER,
        parts.IPC,
    ]  # fmt: skip
    assert [way.name for way in group[-1].ways] == ["both ways"]
    assert parts.COLLECTIVES not in [part.name for part in alone]
    assert not {parts.GRAPHS, parts.AHEAD} & {part.name for part in eager}


def test_steps_ahead_that_choose_other_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that mixes rows up, and one whose tokens are read before they have come home."""
    prove_ahead(SHAPE)
    with monkeypatch.context() as patch:
        patch.setattr(Following, "ids", lambda each: each.tokens.of_rows((0, 1, 2, 3)))
        with pytest.raises(WrongResult, match="turn 1: tokens"):
            prove_ahead(SHAPE)

    monkeypatch.setattr(
        ahead_proofs, "send_home", lambda chosen: UnreadTokens(chosen, torch.zeros_like(chosen), behind_all(CPU))
    )
    with pytest.raises(WrongResult, match="turn 0: tokens"):
        prove_ahead(SHAPE)
