"""A request as its simulated worker knows it: tokens, pages, what each page must hold, and the hidden states that it
saves.
"""

from __future__ import annotations

from shared.chunks import chunk_pages, chunk_tokens
from shared.ids import chain_root
from shared.messages import worker_events
from shared.messages import worker_plans as plans
from shared.messages.base import pack_int32, unpack_int32
from tests.simulation.contents import GARBAGE, Copy, HostPool, Page, WrongContent, lossy_root, require


class Sequence:
    """One attempt of a request. ``memory`` is its worker's device."""

    def __init__(self, admit: plans.AdmitRequest, namespace: str, page_size: int, memory: dict[int, Page]) -> None:
        self.admit = admit
        self.tokens = unpack_int32(admit.tokens)
        self.pages = unpack_int32(admit.pages)
        self.computed = admit.cached_tokens
        self.has_failed = False
        self.is_wrong = False  # It read what it should not have, on a worker that was given up: its tokens are wrong.
        self.asked_at = -1  # Pages held when it last asked for more.
        self.has_read_sparse = False
        self.saving: Saving | None = None
        self.sampled = 0  # Tokens of this attempt.
        self._size = page_size
        self._memory = memory
        # What is before each page, as far as that was needed yet; behind a sparse prefix it begins anew.
        self._above = [chain_root(namespace)]
        if admit.sparse is not None:
            self._lossy_above = [lossy_root(admit.request_id, admit.attempt)]

    @property
    def request_id(self) -> str:
        return self.admit.request_id

    @property
    def output(self) -> list[int]:
        return self.tokens[self.admit.prompt_tokens :]

    @property
    def is_lossy(self) -> bool:
        return self.admit.sparse is not None

    @property
    def is_decoding(self) -> bool:
        return self.sampled > 0 and not self.has_failed

    def above(self, index: int) -> bytes:
        """The identity of everything before page ``index``."""
        chain, first = self._above, 0
        sparse = self.admit.sparse
        if sparse is not None and index * self._size >= sparse.end:
            chain, first = self._lossy_above, sparse.end // self._size
        while len(chain) <= index - first:
            start = (first + len(chain) - 1) * self._size
            chain.append(Page(chain[-1], tuple(self.tokens[start : start + self._size])).identity())
        return chain[index - first]

    def check_prefix(self, end: int) -> None:
        """Attention is about to read the KV of tokens [0, end). Raises WrongContent unless each page holds those."""
        size, sparse = self._size, self.admit.sparse
        if sparse is not None:
            root = lossy_root(self.request_id, self.admit.attempt)
            for number in unpack_int32(sparse.pages):
                page = self._memory.get(number)
                if page is None or page.above != root or page.tokens:
                    raise WrongContent(f"page {number} holds {page} in the place of what {self.request_id} chose")
        for index in range(-(-end // size)):
            if sparse is not None and sparse.start <= index * size < sparse.end:
                continue
            wanted = tuple(self.tokens[index * size : min(end, (index + 1) * size)])
            page = self._memory.get(self.pages[index])
            if page is None or page.above != self.above(index) or page.tokens[: len(wanted)] != wanted:
                raise WrongContent(f"page {self.pages[index]} holds {page}, not {wanted[:4]}... of {self.request_id}")

    def write(self, start: int, end: int) -> None:
        """Put down the KV of tokens [start, end)."""
        size = self._size
        for index in range(start // size, -(-end // size)):
            first = max(start, index * size)
            number = self.pages[index]
            before = self._memory[number].tokens[: first - index * size] if first > index * size else ()
            tokens = before + tuple(self.tokens[first : min(end, (index + 1) * size)])
            self._memory[number] = Page(self.above(index) if not self.is_wrong else GARBAGE.above, tokens)

    def has_room(self) -> bool:
        """Whether there is a page for the token that is fed next."""
        return self.computed // self._size < len(self.pages)

    def wants_lease(self, threshold: int) -> bool:
        """Whether it should ask for more pages now; it does so once for each length of its page table."""
        held = len(self.pages) * self._size
        if held - len(self.tokens) > threshold or self.asked_at == len(self.pages):
            return False
        return held < self.admit.prompt_tokens + self.admit.sampling.max_tokens

    def extend(self, order: plans.ExtendLease) -> None:
        """More pages."""
        self.pages += unpack_int32(order.pages)
        self.check_table()
        require(not order.hidden_pages or self.saving is not None, "a hidden lease that is not there is extended")
        if self.saving is not None and order.hidden_pages:
            self.saving.extend(order.hidden_pages)

    def check_table(self) -> None:
        """No page is in the table twice, and none is missing but those of a sparse prefix."""
        chosen = unpack_int32(self.admit.sparse.pages) if self.admit.sparse is not None else []
        used = [page for page in self.pages if page >= 0] + chosen
        require(len(set(used)) == len(used), f"{self.request_id} has a page twice")
        sparse = self.admit.sparse
        absent = [index for index, page in enumerate(self.pages) if page < 0]
        spared = range(sparse.start // self._size, sparse.end // self._size) if sparse is not None else range(0)
        require(absent == list(spared), f"{self.request_id} lacks pages {absent}")


class Saving:
    """What a hidden lease has brought so far."""

    def __init__(self, lease: plans.HiddenLease, pool: HostPool | None, page_size: int) -> None:
        self.lease = lease
        self.pool = pool
        self.is_late = False  # The worker was given up: what it writes is not to be relied upon.
        self._size = page_size
        self._pages = unpack_int32(lease.pages)
        self._above = lease.parent
        self._end = lease.depth
        self._waiting: list[int] = []  # Captured, and not a whole chunk yet.
        self._sealed: list[int] = []
        require(bool(self._pages), "a hidden lease of nothing")
        require(lease.depth % chunk_tokens(page_size) == 0, "a hidden lease begins within a chunk")

    def extend(self, pages: bytes) -> None:
        """More pages."""
        self._pages += unpack_int32(pages)
        require(len(set(self._pages)) == len(self._pages), "a page is in one hidden lease twice")

    def capture(self, start: int, tokens: list[int]) -> None:
        """Tokens from ``start`` on were computed: chunks that they complete are sealed."""
        if not start <= self._end < start + len(tokens):
            return  # What comes after a gap is of no use.
        self._waiting += tokens[self._end - start :]
        self._end = start + len(tokens)
        size, each = chunk_tokens(self._size), chunk_pages(self._size)
        while len(self._waiting) >= size and len(self._sealed) < len(self._pages) * self._size:
            first = len(self._sealed) // self._size
            for index, place in enumerate(self._pages[first : first + each]):
                page = Page(self._above, tuple(self._waiting[index * self._size : (index + 1) * self._size]))
                self._above = page.identity()
                if self.pool is not None:
                    self.pool.memory[place] = Copy(self._above, page, self.is_late)
            self._sealed += self._waiting[:size]
            del self._waiting[:size]

    def answer(self, worker_id: str, incarnation: str) -> worker_events.HiddenSaved:
        """What to say when the sequence ends."""
        tokens = self._sealed if self.pool is not None else []
        return worker_events.HiddenSaved(
            worker_id=worker_id,
            incarnation=incarnation,
            lease_id=self.lease.lease_id,
            chunks=len(tokens) // chunk_tokens(self._size),
            tokens=pack_int32(tokens),
        )
