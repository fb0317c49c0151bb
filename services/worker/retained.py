"""What this worker has told gateways, kept so that they can ask again (``rpc.worker.<id>.outputs``).

An attempt starts behind the tokens that are known of its request, so what earlier attempts said before that stays a
part of the answer, and is kept as it was said. From there on only the new attempt's word counts: attempts of an exact
request agree on every token, but one behind a sparse prefix may go on with others, and the two must never be joined.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from shared.messages.tokens import TokenItem


@dataclass(slots=True)
class _Told:
    """``items`` are in order of their positions, which do not overlap; something may be missing between two."""

    attempt: int
    items: list[TokenItem] = field(default_factory=list)

    def append(self, item: TokenItem) -> None:
        """Add what comes last, in the place of what older attempts said from its position on."""
        while self.items and self.items[-1].attempt < item.attempt and not _leads_to(self.items[-1], item):
            self.items.pop()
        self.items.append(item)

    def place(self, index: int) -> int:
        """Where the first item is that begins at ``index`` or later. Does not mutate."""
        return bisect_left(self.items, index, key=lambda item: item.index)


class RetainedOutputs:
    """Items of running requests, and of the last ``finished_limit`` that are over. Owned by the event loop."""

    def __init__(self, finished_limit: int) -> None:
        self._finished_limit = finished_limit
        self._running: dict[str, _Told] = {}
        self._finished: OrderedDict[str, _Told] = OrderedDict()

    def add(self, item: TokenItem) -> None:
        """Remember an item that was said; it replaces what older attempts said from its position on."""
        told = self._open(item)
        if told is not None:
            told.append(item)
            if item.finish is not None:
                self.retire(item.request_id)

    def recall(self, item: TokenItem) -> None:
        """Remember one token that an attempt begins with. Such tokens come in order, before the attempt adds its own.

        What was said here of the same token is kept for it, since it has logprobs too, and counts as this attempt's.
        """
        told = self._open(item)
        if told is None:
            return
        place = told.place(item.index)
        if place < len(told.items) and _is_same(told.items[place], item):
            told.items[place] = msgspec.structs.replace(told.items[place], attempt=item.attempt)
        else:
            told.append(item)

    def _open(self, item: TokenItem) -> _Told | None:
        """Return what is known of a request that is heard (again); None where an older attempt is, which is over."""
        request_id = item.request_id
        told = self._running.get(request_id) or self._finished.get(request_id) or _Told(item.attempt)
        if item.attempt < told.attempt:
            return None
        told.attempt = item.attempt
        self._finished.pop(request_id, None)
        self._running[request_id] = told
        return told

    def retire(self, request_id: str) -> None:
        """Retire a request that is over here, or was preempted: keep it among the last ones."""
        told = self._running.pop(request_id, None)
        if told is None:
            return
        self._finished[request_id] = told
        while len(self._finished) > self._finished_limit:
            self._finished.popitem(last=False)

    def find(self, request_id: str, index: int, *, max_bytes: int) -> TokenItem | None:
        """Everything from output position ``index`` on as one item, or None if the request is not known.

        An answer too long for ``max_bytes`` is cut between two tokens, and so is one before a gap or where another
        attempt goes on, which a gateway may have reason to refuse; the gateway asks again from there.
        """
        told = self._running.get(request_id) or self._finished.get(request_id)
        if told is None:
            return None
        wanted = [item for item in told.items if item.index >= index or item.index + len(item.tokens) > index]
        kept: list[TokenItem] = []
        nbytes = 0
        for item in wanted:
            nbytes += _estimate(item)
            if kept and (nbytes > max_bytes or item.index != _end(kept[-1]) or item.attempt != kept[-1].attempt):
                break
            kept.append(item)
        return _join(kept) if kept else TokenItem(request_id=request_id, attempt=told.attempt, index=index, tokens=())


def _end(item: TokenItem) -> int:
    """Return the output position behind an item."""
    return item.index + len(item.tokens)


def _leads_to(said: TokenItem, item: TokenItem) -> bool:
    """Whether a newer attempt's item goes on behind what an older one said. No end of an older one is the end then."""
    return said.finish is None and _end(said) <= item.index


def _is_same(said: TokenItem, recalled: TokenItem) -> bool:
    return said.index == recalled.index and said.tokens == recalled.tokens and said.finish is None


def _join(items: list[TokenItem]) -> TokenItem:
    first, last = items[0], items[-1]
    return msgspec.structs.replace(
        first,
        tokens=tuple(token for item in items for token in item.tokens),
        text="".join(item.text for item in items),
        logprobs=tuple(logprob for item in items for logprob in item.logprobs),
        finish=last.finish,
        stop_match=last.stop_match,
        error=last.error,
        usage=last.usage or first.usage,
    )


def _estimate(item: TokenItem) -> int:
    """Bytes on the wire, rounded up."""
    prompt = sum(32 + 16 * len(one.top) if one is not None else 1 for one in item.prompt_logprobs or ())
    logprobs = sum(64 + 16 * len(one.top) for one in item.logprobs)
    return 256 + 5 * len(item.tokens) + 4 * len(item.text) + len(item.error) + logprobs + prompt
