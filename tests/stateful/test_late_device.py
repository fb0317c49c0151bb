"""What is reported as computed is in the pool, whoever reads it: on a device that does everything as late as it may."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.storage.backends import ChunkKey
from services.storage.chunk_format import blob_nbytes
from services.storage.chunk_gathering import gather_chunk, pages_of
from services.storage.core.backup_check import Transfer
from services.storage.core.save_check import NOWHERE, SaveChunk
from services.storage.mover import copy_transfer
from shared.memory import DevicePoolView
from shared.messages.base import pack_int32
from shared.messages.worker_plans import AttachNeighbour, PageLoad
from tests.cuda.late_device import LateMover, LateRunner
from tests.unit.worker.driven_executor import Driven, abort, admit, batch, chunk, labels_of, load
from tests.unit.worker.fake_model import GEOMETRY, PAGE_SIZE, continuation, kv_of
from tests.unit.worker.pools import identity_of

PAGES = 24
CHUNK_PAGES = 16


def page_bytes(tokens: list[int], index: int) -> bytes:
    """Page ``index`` of a prompt as pools hold it page-first: every layer has the same K and V."""
    kv = kv_of(tokens)[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
    return (kv[:, 0].tobytes() + kv[:, 1].tobytes()) * GEOMETRY.layers


def turned(shift: int) -> list[int]:
    """All pages, from another one on."""
    return [(page + shift) % PAGES for page in range(PAGES)]


class LateCell(RuleBasedStateMachine):
    """A worker and its neighbour on late devices, and a storage beside them. One prompt at a time is on the worker."""

    def __init__(self) -> None:
        super().__init__()
        self.worker, self.neighbour = (self._worker() for _ in range(2))
        self.device = DevicePoolView.attach(self.worker.runner.pool.handle())
        self.host = self.worker.host_pool(PAGES)
        self.tokens: list[int] = []
        self.pages: list[int] = []
        self.computed = 0  # Tokens of the prompt that were reported.
        self.backed_up: dict[int, bytes] = {}  # Index of a page of this prompt to its bytes, in the host page alike.
        self.count = 0

    def _worker(self) -> Driven:
        runner = LateRunner(PAGES)
        return Driven(runner, mover=LateMover(runner.pool))

    def teardown(self) -> None:
        self.device.close()
        self.worker.close()
        self.neighbour.close()

    @initialize()
    def begin(self) -> None:
        pool = self.worker.runner.pool.handle()
        self.neighbour.give(AttachNeighbour(worker_id="w", worker_incarnation="inc", handle=pool))
        self._admit([3] * (CHUNK_PAGES * PAGE_SIZE + 5), list(range(PAGES)), 0)

    def _admit(self, tokens: list[int], pages: list[int], cached: int) -> None:
        self.count += 1
        self.tokens, self.pages, self.computed = tokens, pages, cached
        self.worker.give(admit(tokens, pages, request_id=f"r{self.count}", cached=cached, host_tokens=cached))

    def _run(self, driven: Driven, last: int, **fields: object) -> None:
        before = len(driven.done())
        driven.give(batch(chunk(self.computed, last, request_id=f"r{self.count}"), **fields))  # type: ignore[arg-type]
        driven.run()
        (done,) = driven.done()[before:]
        assert done.failed == ()

    @property
    def full_pages(self) -> int:
        return self.computed // PAGE_SIZE

    @precondition(lambda self: self.computed < len(self.tokens) - 1)
    @rule(rows=st.integers(1, 40))
    def compute(self, rows: int) -> None:
        """A chunk that samples nothing."""
        last = min(self.computed + rows, len(self.tokens) - 1)
        self._run(self.worker, last)
        self.computed = last

    @precondition(lambda self: self.full_pages > 0)
    @rule(data=st.data())
    def back_up(self, data: st.DataObject) -> None:
        """The storage copies pages that were reported, and seals them."""
        first = data.draw(st.integers(0, self.full_pages - 1))
        numbers = np.arange(first, self.full_pages, dtype=np.int32)
        identities = tuple(identity_of(label) for label in labels_of(self.tokens, numbers.tolist()))
        device_pages = np.array([self.pages[number] for number in numbers], dtype=np.int32)

        copy_transfer(Transfer(1, "w", "inc", device_pages, numbers, identities), self.device, self.host)

        for number in numbers.tolist():
            assert self.host.pages[number].tobytes() == page_bytes(self.tokens, number)
            self.backed_up[number] = page_bytes(self.tokens, number)

    @precondition(lambda self: self.full_pages >= CHUNK_PAGES)
    @rule()
    def save(self) -> None:
        """The storage gathers a chunk for the disk from the device."""
        identities = b"".join(identity_of(label) for label in labels_of(self.tokens, range(CHUNK_PAGES)))
        blob = memoryview(bytearray(blob_nbytes(GEOMETRY)))
        one = SaveChunk(
            key=ChunkKey("m", b"n", identities[-16:]), place=0, above=None, parent=b"", identities=identities,
            tokens=pack_int32(self.tokens[: CHUNK_PAGES * PAGE_SIZE]),
            host_pages=np.full(CHUNK_PAGES, NOWHERE, np.int32),
            device_pages=np.array(self.pages[:CHUNK_PAGES], np.int32),
        )  # fmt: skip

        gather_chunk(one, blob, self.host, self.device)

        for number, page in enumerate(pages_of(blob, GEOMETRY)):
            assert page.tobytes() == page_bytes(self.tokens, number)

    @precondition(lambda self: self.full_pages > 0)
    @rule()
    def copy_to_the_neighbour(self) -> None:
        """The neighbour goes on from pages that were reported, and its whole answer is right."""
        count = self.full_pages
        name, tokens = f"n{len(self.neighbour.finished())}", self.tokens[: count * PAGE_SIZE + 1]
        taken = PageLoad(
            request_id=name, attempt=1, storage_id="", identities=bytes(16 * count),
            host_pages=pack_int32(self.pages[:count]), device_pages=pack_int32(range(count)),
            neighbour_id="w", neighbour_incarnation="inc",
        )  # fmt: skip
        self.neighbour.give(
            admit(tokens, range(PAGES), request_id=name, cached=count * PAGE_SIZE, max_tokens=2),
            batch(chunk(count * PAGE_SIZE, len(tokens), request_id=name), loads=[taken]),
        )

        self.neighbour.run()

        assert self.neighbour.tokens(name) == continuation(tokens, 2)

    @rule(first=st.integers(3, 9), shift=st.integers(0, PAGES - 1))
    def reuse(self, first: int, shift: int) -> None:
        """Another prompt gets the same pages at other places. Nothing of the old one lands on them later."""
        self.worker.give(abort(request_id=f"r{self.count}"))
        self.backed_up.clear()
        self._admit([first] * len(self.tokens), turned(shift), 0)

    @precondition(lambda self: 0 in self.backed_up)
    @rule(shift=st.integers(0, PAGES - 1))
    def reuse_by_a_load(self, shift: int) -> None:
        """The same prompt is brought back from the host pool, into pages that computing has just left."""
        count = next(number for number in range(PAGES) if number not in self.backed_up)
        self.worker.give(abort(request_id=f"r{self.count}"))
        pages = turned(shift)
        self._admit(self.tokens, pages, count * PAGE_SIZE)
        name, numbers = f"r{self.count}", range(count)
        loads = [load(self.tokens, numbers, numbers, pages[:count], request_id=name)]
        self._run(self.worker, self.computed + 1, loads=loads)
        self.computed += 1

    @invariant()
    def what_was_reported_is_there(self) -> None:
        """Whatever reads the pool now, without waiting for anything, finds the KV of the prompt."""
        rows = self.device.gather(0, PAGES)
        for number in range(self.full_pages):
            assert rows[self.pages[number]].tobytes() == page_bytes(self.tokens, number)


LateCell.TestCase.settings = settings(max_examples=30, stateful_step_count=12, deadline=None)
TestLateCell = LateCell.TestCase


def test_the_time_of_a_step_is_that_of_the_device() -> None:
    """A chunk that samples nothing takes as long as the device takes for it, not as long as it takes to launch it."""
    runner = LateRunner(PAGES, lambda: driven.spend(5_000_000))
    driven = Driven(runner, mover=LateMover(runner.pool))
    driven.give(admit([3] * 20, range(PAGES)), batch(chunk(0, 16)))

    driven.run()

    (done,) = driven.done()
    assert done.compute_us == GEOMETRY.layers * 5_000 + 1
    driven.close()
