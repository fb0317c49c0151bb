"""Items sent to gateways, retained so that gateways can ask for them again (``rpc.worker.<id>.outputs``).

An attempt starts behind the tokens that are known of its request, so items of earlier attempts before that point stay a
part of the answer, and are kept as they were sent. From there on only the new attempt counts: attempts of an exact
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
    """Items sent for one request, in order of their positions, which do not overlap and may have gaps."""

    attempt: int
    items: list[TokenItem] = field(default_factory=list)

    def append(self, item: TokenItem) -> None:
        """Add the last item, in the place of older attempts' items from its position on."""
        while self.items and self.items[-1].attempt < item.attempt and not _leads_to(self.items[-1], item):
            self.items.pop()
        self.items.append(item)

    def place(self, index: int) -> int:
        """Return the place of the first item that begins at ``index`` or later. Does not change the state."""
        return bisect_left(self.items, index, key=lambda item: item.index)


class RetainedOutputs:
    """Items of running requests, and of the last ended ones. Owned by the event loop."""

    def __init__(self, finished_limit: int) -> None:
        """Begin with no items; of ended requests the last ``finished_limit`` are kept, with 0 none."""
        self._finished_limit = finished_limit
        self._running: dict[str, _Told] = {}
        self._finished: OrderedDict[str, _Told] = OrderedDict()

    def add(self, item: TokenItem) -> None:
        """Remember an item that was sent; it replaces items of older attempts from its position on."""
        told = self._open(item)
        if told is not None:
            told.append(item)
            if item.finish is not None:
                self.retire(item.request_id)

    def recall(self, item: TokenItem) -> None:
        """Remember one token that an attempt begins with. Such tokens come in order, before the attempt adds its own.

        An item that was already sent for the same token is kept in its place, since it has logprobs too, and counts as
        this attempt's.
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
        """Return the items of a request; None where ``item`` is of an older attempt, which is over."""
        request_id = item.request_id
        told = self._running.get(request_id) or self._finished.get(request_id) or _Told(item.attempt)
        if item.attempt < told.attempt:
            return None
        told.attempt = item.attempt
        self._finished.pop(request_id, None)
        self._running[request_id] = told
        return told

    def retire(self, request_id: str) -> None:
        """Move a request that has ended here, or was preempted, to the retained ended ones."""
        told = self._running.pop(request_id, None)
        if told is None:
            return
        self._finished[request_id] = told
        while len(self._finished) > self._finished_limit:
            self._finished.popitem(last=False)

    def find(self, request_id: str, index: int, *, max_bytes: int) -> TokenItem | None:
        """Return the output from position ``index`` on as one item, or None if the request is not known.

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
    """Return whether a newer attempt's item continues an older one's. The end of an older attempt is void then."""
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
    """Return an item's size on the wire in bytes, rounded up."""
    prompt = sum(32 + 16 * len(one.top) if one is not None else 1 for one in item.prompt_logprobs or ())
    logprobs = sum(64 + 16 * len(one.top) for one in item.logprobs)
    return 256 + 5 * len(item.tokens) + 4 * len(item.text) + len(item.error) + logprobs + prompt
