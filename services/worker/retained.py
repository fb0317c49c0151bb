"""What this worker has told gateways, kept so that they can ask again (``rpc.worker.<id>.outputs``).

Attempts of one request agree on every token, because sampling is a pure function of seed, position and logits. So
whatever is known of a request answers the question, whichever attempt said it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from shared.messages.tokens import TokenItem


@dataclass(slots=True)
class _Told:
    attempt: int
    items: list[TokenItem] = field(default_factory=list)


class RetainedOutputs:
    """Items of running requests, and of the last ``finished_limit`` that are over. Owned by the event loop."""

    def __init__(self, finished_limit: int) -> None:
        self._finished_limit = finished_limit
        self._running: dict[str, _Told] = {}
        self._finished: OrderedDict[str, _Told] = OrderedDict()

    def add(self, item: TokenItem) -> None:
        """Remember an item; a newer attempt replaces what an older one said."""
        told = self._running.get(item.request_id)
        if told is None or told.attempt < item.attempt:
            told = self._running[item.request_id] = _Told(item.attempt)
            self._finished.pop(item.request_id, None)
        told.items.append(item)
        if item.finish is not None:
            self.retire(item.request_id)

    def retire(self, request_id: str) -> None:
        """The request is over here, or was preempted: keep it among the last ones."""
        told = self._running.pop(request_id, None)
        if told is None:
            return
        self._finished[request_id] = told
        while len(self._finished) > self._finished_limit:
            self._finished.popitem(last=False)

    def find(self, request_id: str, index: int, *, max_bytes: int) -> TokenItem | None:
        """Everything from output position ``index`` on as one item, or None if the request is not known.

        An answer too long for ``max_bytes`` is cut between two tokens; the gateway asks again from there.
        """
        told = self._running.get(request_id) or self._finished.get(request_id)
        if told is None:
            return None
        wanted = [item for item in told.items if item.index >= index or item.index + len(item.tokens) > index]
        kept: list[TokenItem] = []
        nbytes = 0
        for item in wanted:
            nbytes += _estimate(item)
            if kept and nbytes > max_bytes:
                break
            kept.append(item)
        return _join(kept) if kept else TokenItem(request_id=request_id, attempt=told.attempt, index=index, tokens=())


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
