"""Chunks out of another storage's host pool: what arrives is what was sealed there, or nothing does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from services.storage.backends import ChunkKey
from services.storage.core.chunk_runs import run_keys
from services.storage.core.fetch_check import FetchChunk
from services.storage.core.fetch_progress import FetchProgress
from services.storage.fetcher import Fetcher
from services.storage.io_threads import IoThreads
from services.storage.page_gate import PageGate
from services.storage.pools import Pools
from services.storage.sharing import nixl_engine
from services.storage.sharing.engine import LateRead, TransferEngine
from services.storage.sharing.lenders import Lenders
from services.storage.sharing.loan_groups import chunks_a_read, slot_nbytes
from services.storage.sharing.loan_run import LoanRun
from services.storage.sharing.nixl_engine import NixlEngine
from services.storage.sharing.open_pool import SharedPool
from services.storage.sharing.parts import is_installed
from services.storage.tier_events import TierEvents
from shared import subjects
from shared.chunks import chunk_pages
from shared.errors import IntegrityError, InvalidRequest, TransportError
from shared.ids import chain_pages, chain_root, namespace_digest
from shared.memory import HostPoolView, unlink_all
from shared.messages.base import pack_int32
from shared.messages.pools import KvGeometry
from shared.messages.storage_plans import FetchChunks, Lender
from tests.memory_bus import MemoryBroker, MemoryBus
from tests.run_name import RUN
from tests.unit.storage.sharing.fake_agent import FakeAgent
from tests.unit.storage.sharing.local_engine import LocalEngine

GEOMETRY = KvGeometry(layers=3, kv_heads=2, head_dim=8, page_size=16, dtype="float32")
NAMESPACE = namespace_digest("model")
EACH = chunk_pages(GEOMETRY.page_size)
LENDER, INCARNATION = "storage-a", "storage-a-1"


@dataclass
class Fetched:
    """How a fetch ended: "" or why early, what has arrived, and events on the way."""

    error: str
    progress: FetchProgress
    reports: int


@dataclass
class Nodes:
    """A lender with one chunk in its pool, and a borrower with an empty one."""

    bus: MemoryBus
    lent: HostPoolView
    own: HostPoolView
    lenders: Lenders
    engine: TransferEngine
    identities: bytes
    pools: Pools
    threads: IoThreads
    pages: list[int] = field(default_factory=lambda: [5, 6, 2, 9])

    def chunk(self, *, wanted: Sequence[bool] = (True,) * EACH) -> FetchChunk:
        places = [index + 1 if is_wanted else -1 for index, is_wanted in enumerate(wanted)]
        pages = np.array(places, np.int32)
        return FetchChunk(_key(self.identities), 0, self.identities, pages)

    def lender(self, incarnation: str = INCARNATION, pages: list[int] | None = None) -> Lender:
        return Lender(storage_id=LENDER, incarnation=incarnation, pages=pack_int32(pages or self.pages))

    async def fetch(self, *chunks: FetchChunk, lender: Lender | None = None) -> Fetched:
        """Bring chunks by one fetch."""
        lender = lender or self.lender()
        groups, progress = self.lenders.groups(lender, list(chunks)), FetchProgress(len(chunks))
        reports = 0

        async def report() -> None:
            nonlocal reports
            reports += 1

        error = await LoanRun(self.lenders, lender, groups, progress, self.own, left_s=lambda: 5.0).bring(report)
        return Fetched(error, progress, reports)


def _key(identities: bytes) -> ChunkKey:
    (key,) = run_keys(NAMESPACE, identities, GEOMETRY)
    return key


BY_NIXL = pytest.mark.parametrize(
    "nodes",
    ["local", pytest.param("nixl", marks=pytest.mark.skipif(not is_installed(), reason="NIXL has no wheel here"))],
    indirect=True,
)
"""By an engine that copies memory, and by NIXL."""


@pytest.fixture
async def nodes(request: pytest.FixtureRequest) -> AsyncIterator[Nodes]:
    """Both sides in this process; the engine is the parameter, or one that copies memory."""
    is_nixl = getattr(request, "param", "local") == "nixl"
    made = [NixlEngine(name) if is_nixl else LocalEngine() for name in ("lender", "borrower")]
    prefix, bus, threads = f"{RUN}-sharing", MemoryBroker().connect("test"), IoThreads(4)
    pools = Pools(prefix, 1 << 20)
    pools.create_host(GEOMETRY)
    own = HostPoolView.create(prefix, GEOMETRY, 64)
    shared = SharedPool(pools, made[0], INCARNATION)
    serving = await bus.serve(subjects.rpc("storage", "pool", LENDER), shared.answer)
    lenders = Lenders(bus, made[1], threads, staging_bytes=1 << 20)
    lenders.open(GEOMETRY)
    tokens = np.arange(EACH * GEOMETRY.page_size, dtype="<i4").tobytes()
    identities = chain_pages(chain_root(NAMESPACE), tokens, GEOMETRY.page_size * 4)
    nodes = Nodes(bus, pools.host, own, lenders, made[1], identities, pools, threads)
    rng = np.random.default_rng(3)
    for index, page in enumerate(nodes.pages):
        pools.host.pages[page] = rng.integers(0, 256, pools.host.pages[page].shape, np.uint8)
        pools.host.seal_page(page, identities[16 * index : 16 * index + 16])
    yield nodes
    await serving.close()
    lenders.close()
    made[0].close()
    threads.close()
    own.unlink()
    own.close()
    pools.close()
    unlink_all(prefix)


@BY_NIXL
async def test_pages_arrive_as_they_were_sealed(nodes: Nodes) -> None:
    """Bytes, identities and checksums; the second chunk of the same lender needs no new connection."""
    result = await nodes.fetch(nodes.chunk())

    assert result.error == ""
    assert result.progress.nbytes == EACH * GEOMETRY.page_bytes
    assert result.progress.lent_chunks == 1
    for index, page in enumerate(nodes.pages):
        assert np.array_equal(nodes.own.pages[index + 1], nodes.lent.pages[page])
        for layer in range(GEOMETRY.layers):
            nodes.own.verify_layer(index + 1, layer, nodes.identities[16 * index : 16 * index + 16])
    assert not (await nodes.fetch(nodes.chunk())).error
    if isinstance(nodes.engine, LocalEngine):
        assert nodes.engine.connections == 1


async def test_only_wanted_pages_are_read(nodes: Nodes) -> None:
    """The lender need not have the others any more."""
    nodes.lent.clear(nodes.pages[0])
    result = await nodes.fetch(nodes.chunk(wanted=(False, True, True, True)))

    assert result.error == ""
    assert result.progress.nbytes == (EACH - 1) * GEOMETRY.page_bytes
    assert not nodes.own.identities[0].any()


@BY_NIXL
async def test_a_damaged_page_is_a_miss(nodes: Nodes) -> None:
    """One bit, in whichever layer; nothing of the chunk reaches the own pool."""
    for layer in range(GEOMETRY.layers):
        nodes.lent.pages[nodes.pages[2], layer, 7] ^= 1
        result = await nodes.fetch(nodes.chunk())
        nodes.lent.pages[nodes.pages[2], layer, 7] ^= 1

        assert result.progress.chunks == 0
        assert "damaged" in result.error
        assert not nodes.own.identities.any()


async def test_another_incarnation_is_not_read(nodes: Nodes) -> None:
    """Page numbers of a pool that is gone mean nothing in the next one."""
    result = await nodes.fetch(nodes.chunk(), lender=nodes.lender("storage-a-0"))

    assert "this incarnation has ended" in result.error


async def test_a_lender_that_is_away_is_a_miss(nodes: Nodes) -> None:
    """Nobody answers on its subject."""
    away = Lender(storage_id="storage-x", incarnation="x", pages=pack_int32(nodes.pages))
    result = await nodes.fetch(nodes.chunk(), lender=away)

    assert "storage-x does not share its pool" in result.error


async def test_a_page_outside_the_lenders_pool_is_a_miss(nodes: Nodes) -> None:
    """Nothing beyond its pool is read."""
    result = await nodes.fetch(nodes.chunk(), lender=nodes.lender(pages=[5, 6, 2, 1 << 20]))

    assert "has no page" in result.error


async def test_senseless_orders_are_refused(nodes: Nodes) -> None:
    """Too few pages, or none for a page that is wanted."""
    for pages in ([1, 2, 3], [1, 2, 3, -1]):
        with pytest.raises(InvalidRequest):
            nodes.lenders.groups(nodes.lender(pages=pages), [nodes.chunk()])


async def test_a_failed_read_connects_again(nodes: Nodes) -> None:
    """The next chunk asks the lender anew where its pool is."""
    assert isinstance(nodes.engine, LocalEngine)
    nodes.engine.fault = _raise(TransportError("cut"))
    assert (await nodes.fetch(nodes.chunk())).error
    nodes.engine.fault = lambda: None
    assert not (await nodes.fetch(nodes.chunk())).error
    assert nodes.engine.connections == 2
    assert list(nodes.lenders.faults()) == []


async def test_memory_of_a_late_read_is_not_used_until_it_is_over(nodes: Nodes) -> None:
    """That is said meanwhile, other buffers serve, and where there is none left it is a miss."""
    assert isinstance(nodes.engine, LocalEngine)
    is_over = False
    nodes.engine.fault = _raise(LateRead("it goes on", lambda: is_over))
    late = 0
    while "every buffer" not in (await nodes.fetch(nodes.chunk())).error:
        late += 1
    nodes.engine.fault = lambda: None
    refused = await nodes.fetch(nodes.chunk())
    ((what, reason, flag),) = nodes.lenders.faults()

    assert "every buffer" in refused.error
    assert (what, flag) == ("sharing", "--share")
    assert late > 1
    assert f"{late} buffers" in reason
    is_over = True
    assert not (await nodes.fetch(nodes.chunk())).error
    assert list(nodes.lenders.faults()) == []


async def test_a_read_that_is_late_while_its_fetch_is_cut_off_is_watched(nodes: Nodes) -> None:
    """As any other late read: no other read gets its memory before it is over, and its connection is dropped."""
    engine, is_over = nodes.engine, False
    assert isinstance(engine, LocalEngine)

    await _cut_off(nodes, engine, LateRead("it goes on", lambda: is_over))
    engine.fault = lambda: None

    assert [reason for _, reason, _ in nodes.lenders.faults()] == ["1 buffers are held by reads that are late"]
    assert engine.disconnected == ["peer"]
    is_over = True
    assert list(nodes.lenders.faults()) == []
    assert not (await nodes.fetch(nodes.chunk())).error
    assert engine.connections == 2


async def test_a_read_that_ends_while_its_fetch_is_cut_off_gives_its_memory_back(nodes: Nodes) -> None:
    """Whether it succeeds or fails: nothing is written any more, and its connection stays."""
    engine = nodes.engine
    assert isinstance(engine, LocalEngine)
    for error in (None, TransportError("cut")):
        await _cut_off(nodes, engine, error)

        assert list(nodes.lenders.faults()) == []
        assert engine.disconnected == []


async def test_a_peer_whose_late_read_was_cut_off_is_added_again_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch, nodes: Nodes
) -> None:
    """Until then it is kept as it is: adding it again would lose the end of the read."""
    agent = FakeAgent()
    monkeypatch.setattr(nixl_engine, "find_api", lambda: None)
    monkeypatch.setattr(nixl_engine, "_agent", lambda api, name: agent)
    engine = NixlEngine("borrower")
    lenders = Lenders(nodes.bus, engine, nodes.threads, staging_bytes=1 << 20)
    lenders.open(GEOMETRY)
    (group,) = lenders.groups(nodes.lender(), [nodes.chunk()])
    assert not await lenders.connect(nodes.lender(), lambda: 5.0)
    reading = asyncio.create_task(lenders.bring(nodes.lender(), group, nodes.own, lambda: 0.001))
    await asyncio.to_thread(agent.is_polled.wait, 20.0)
    reading.cancel()
    await asyncio.sleep(0)
    agent.gate.set()
    await asyncio.wait({reading})

    assert reading.cancelled()
    assert not await lenders.connect(nodes.lender(), lambda: 5.0)
    assert agent.added == 1
    assert agent.removed == []
    agent.state = "DONE"
    assert list(lenders.faults()) == []
    lenders.forget(nodes.lender())
    assert agent.removed == ["peer"]
    assert not await lenders.connect(nodes.lender(), lambda: 5.0)
    assert agent.added == 2
    lenders.close()


@pytest.mark.skipif(not is_installed(), reason="NIXL has no wheel here")
def test_nixl_says_when_a_late_read_is_over() -> None:
    """Nothing cuts it off: it is complete when it is over, and its peer is not forgotten before."""
    lender, reader = NixlEngine("late-lender"), NixlEngine("late-reader")
    theirs, own = np.full(1 << 24, 7, np.uint8), np.zeros(1 << 24, np.uint8)
    lender.register(theirs)
    reader.register(own)
    told = lender.metadata()
    peer = reader.connect(told)
    with pytest.raises(LateRead) as late:
        reader.read(peer, [(own.ctypes.data, theirs.ctypes.data, own.nbytes)], 0.0)
    reader.disconnect(peer)
    assert reader.connect(told) == peer
    while not late.value.is_over():
        pass

    assert (own == 7).all()
    own[:] = 0
    reader.read(peer, [(own.ctypes.data, theirs.ctypes.data, own.nbytes)], 60.0)
    assert (own == 7).all()
    reader.close()
    lender.close()


CHAIN = 8


def _chain(nodes: Nodes) -> tuple[list[FetchChunk], Lender]:
    """Eight chunks in a row at the lender, its pages in another order, for pages 1 to 32 of the own pool."""
    pages = np.random.default_rng(5).permutation(CHAIN * EACH).astype(np.int32) + 20
    tokens = np.arange(CHAIN * EACH * GEOMETRY.page_size, dtype="<i4").tobytes()
    identities = chain_pages(chain_root(NAMESPACE), tokens, GEOMETRY.page_size * 4)
    rng = np.random.default_rng(4)
    for index, page in enumerate(pages.tolist()):
        nodes.lent.pages[page] = rng.integers(0, 256, nodes.lent.pages[page].shape, np.uint8)
        nodes.lent.seal_page(page, identities[16 * index : 16 * index + 16])
    own = np.arange(1, 1 + CHAIN * EACH, dtype=np.int32)
    chunks = [
        FetchChunk(key, place, identities[place * EACH * 16 : (place + 1) * EACH * 16], own[place * EACH :][:EACH])
        for place, key in enumerate(run_keys(NAMESPACE, identities, GEOMETRY))
    ]
    return chunks, nodes.lender(pages=pages.tolist())


def _sound(nodes: Nodes, chunks: list[FetchChunk]) -> list[bool]:
    """Whether the own pool has each chunk, verified layer by layer."""
    found = []
    for chunk in chunks:
        with contextlib.suppress(IntegrityError):
            for index, page in enumerate(chunk.host_pages.tolist()):
                for layer in range(GEOMETRY.layers):
                    nodes.own.verify_layer(page, layer, chunk.identities[16 * index : 16 * index + 16])
            found.append(chunk.place)
    return [chunk.place in found for chunk in chunks]


@pytest.mark.parametrize(("layers", "expected"), [(3, 16), (40, 8), (1024, 1)])
def test_four_reads_fit_in_the_memory_for_them(layers: int, expected: int) -> None:
    """Of as many chunks as that allows, up to sixteen; where a chunk is large, of one."""
    geometry = KvGeometry(layers=layers, kv_heads=2, head_dim=8, page_size=16, dtype="float32")

    chunks = chunks_a_read(geometry, 11 << 20)

    assert chunks == expected
    assert chunks == 1 or 4 * slot_nbytes(geometry, chunks) <= 11 << 20


@BY_NIXL
async def test_several_chunks_come_by_one_read(nodes: Nodes) -> None:
    """Eight by two, wherever the lender has their pages; the scheduler hears of it on the way."""
    chunks, lender = _chain(nodes)

    fetched = await nodes.fetch(*chunks, lender=lender)

    assert fetched.error == ""
    assert fetched.progress.lent_chunks == fetched.progress.chunks == CHAIN
    assert fetched.reports == 1
    assert all(_sound(nodes, chunks))
    if isinstance(nodes.engine, LocalEngine):
        assert nodes.engine.reads == 2


@pytest.mark.parametrize("bad", [0, CHAIN // 2 - 1, CHAIN // 2, CHAIN - 1])
@pytest.mark.parametrize("is_replaced", [False, True])
async def test_what_comes_before_a_bad_page_of_a_read_arrives(nodes: Nodes, bad: int, is_replaced: bool) -> None:
    """And nothing of its chunk, nor of those behind it by the same read."""
    chunks, lender = _chain(nodes)
    page = int(np.frombuffer(lender.pages, "<i4")[bad * EACH + 2])
    if is_replaced:
        nodes.lent.seal_page(page, bytes(range(16)))
    else:
        nodes.lent.pages[page, 1, 3] ^= 4

    fetched = await nodes.fetch(*chunks, lender=lender)

    assert ("replaced" if is_replaced else "damaged") in fetched.error
    assert chunks[bad].key.identity.hex() in fetched.error
    assert fetched.progress.chunks == bad
    end_of_read = CHAIN // 2 if bad < CHAIN // 2 else CHAIN
    assert _sound(nodes, chunks)[:end_of_read] == [place < bad for place in range(end_of_read)]
    assert not nodes.own.identities[1 + bad * EACH : 1 + end_of_read * EACH].any()


async def test_memory_that_was_refused_is_offered_with_the_next_fetch(nodes: Nodes) -> None:
    """A storage whose memory UCX refused once is no storage that never borrows again."""
    assert isinstance(nodes.engine, LocalEngine)
    nodes.engine.refusals = 2
    nodes.lenders.open(GEOMETRY)

    refused = await nodes.fetch(nodes.chunk())
    ((what, reason, _),) = nodes.lenders.faults()
    taken = await nodes.fetch(nodes.chunk())

    assert "NIXL_ERR_BACKEND" in refused.error
    assert what == "sharing"
    assert "NIXL_ERR_BACKEND" in reason
    assert taken.error == ""
    assert list(nodes.lenders.faults()) == []


@dataclass
class _Events:
    """What the scheduler is told of the end of a fetch."""

    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    seconds: float = 0.0
    error: str = ""

    async def fetched(self, fetch_id: int, progress: FetchProgress, **told: Any) -> None:
        self.seconds, self.error = told["seconds"], told.get("error", "")
        if told["is_over"]:
            self.is_over.set()


async def test_the_time_of_a_loan_is_without_its_connection(nodes: Nodes) -> None:
    """The speed of the network comes of it, and whether the next prefix is worth lending."""
    assert isinstance(nodes.engine, LocalEngine)
    now_s = [0.0]

    def takes(seconds: float) -> Callable[[], None]:
        def pass_time() -> None:
            now_s[0] += seconds

        return pass_time

    nodes.engine.connecting, nodes.engine.fault = takes(5.0), takes(1.0)
    events = _Events()
    source: Any = SimpleNamespace(take_lost=list)
    fetcher = Fetcher(
        form="kv",
        pools=nodes.pools,
        gate=PageGate(),
        source=source,
        threads=nodes.threads,
        events=cast("TierEvents", events),
        clock_s=lambda: now_s[0],
        lenders=nodes.lenders,
    )
    order = FetchChunks(
        fetch_id=1,
        namespace=NAMESPACE,
        depth=0,
        identities=nodes.identities,
        host_pages=pack_int32([1, 3, 4, 7]),
        deadline_ms=60_000,
        lender=nodes.lender(),
    )

    await fetcher.add(order)
    await events.is_over.wait()

    assert events.error == ""
    assert events.seconds == 1.0


@BY_NIXL
async def test_many_chunks_at_once_share_one_connection(nodes: Nodes) -> None:
    """As a fetch reads ahead."""
    results = await asyncio.gather(*(nodes.fetch(nodes.chunk()) for _ in range(8)))

    assert not any(result.error for result in results)
    if isinstance(nodes.engine, LocalEngine):
        assert nodes.engine.connections == 1


def _raise(error: Exception) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


async def _cut_off(nodes: Nodes, engine: LocalEngine, error: Exception | None) -> None:
    """Cancel a fetch whose read is under way, which then ends with ``error``, or well."""
    begun, gate = threading.Event(), threading.Event()
    engine.fault = _hold(begun, gate, error)
    fetching = asyncio.create_task(nodes.fetch(nodes.chunk()))
    await asyncio.to_thread(begun.wait, 20.0)
    fetching.cancel()
    await asyncio.sleep(0)
    gate.set()
    await asyncio.wait({fetching})
    assert fetching.cancelled()


def _hold(begun: threading.Event, gate: threading.Event, error: Exception | None) -> Callable[[], None]:
    def fault() -> None:
        begun.set()
        gate.wait(20.0)
        if error is not None:
            raise error

    return fault


@pytest.mark.skipif(not is_installed(), reason="NIXL has no wheel here")
@pytest.mark.parametrize(("refusals", "is_taken"), [(2, True), (3, False)])
def test_memory_that_was_refused_is_offered_again(
    monkeypatch: pytest.MonkeyPatch, refusals: int, is_taken: bool
) -> None:
    """A few times, because a loaded machine refuses what it takes a moment later."""
    monkeypatch.setattr("services.storage.sharing.nixl_engine._REGISTER_PAUSE_S", 0.0)
    engine, memory, offered = NixlEngine(f"offers-{refusals}"), np.zeros(1 << 16, np.uint8), list[int]()
    register = NixlEngine._register

    def refusing(self: NixlEngine, offer: np.ndarray) -> None:
        offered.append(offer.nbytes)
        if len(offered) <= refusals:
            raise TransportError("NIXL_ERR_BACKEND")
        register(self, offer)

    monkeypatch.setattr(NixlEngine, "_register", refusing)
    with contextlib.nullcontext() if is_taken else pytest.raises(TransportError):
        engine.register(memory)

    assert offered == [memory.nbytes] * 3
    engine.close()
