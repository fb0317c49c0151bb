"""A router's view of its cells, and the choice of one for each request. Pure: time is an argument.

Everything that influences a choice comes in through a method: gateways' reports (``hear_*``), whether they answer
(``opened``, ``closed``), and the router's own requests.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

import xxhash

from services.gateway.held_heads import unpack_heads
from services.gateway.prompt_heads import Asked, Head
from services.gateway.router.cell_work import CellWork
from services.gateway.router.choice import DEFAULT, Candidate, Choice, Rules, choose
from services.gateway.router.head_index import OWN, HeadIndex
from shared.messages.cells import CellHeads, CellLoad

STALE_S = 5.0
"""After so long without a report of load from any gateway of a cell, only the router's own requests count."""

FORGET_S = 60.0
"""After so long without a report, a gateway and its heads are forgotten."""

OWN_S = 30.0
"""How long a head sent to a cell that reports its heads counts as held before the cell reports it."""

MOST_FEEDS = 256
"""Limit on the gateways of one cell; reports of further ones are ignored."""

MOST_SESSIONS = 100_000
MEAN_OF = 1 / 256
"""Weight of the newest prompt in the moving average of lengths."""

FIRST_MEAN_BYTES = 8_192.0


@dataclass(slots=True)
class Feed:
    """The reports of one gateway of a cell. ``wants_whole``: a report was missed, so a whole summary is needed.

    ``asked_tokens`` is None until its first report of load.
    """

    incarnation: str
    number: int = -1
    asked_tokens: int | None = None
    heads_s: float = 0.0
    load_s: float = 0.0
    wants_whole: bool = True


@dataclass(slots=True)
class CellState:
    """The state of one cell.

    ``own`` are this router's requests in progress there; ``others`` were in progress besides at the last report of
    load. ``model`` is the name of its model by the last health check, "" before one tells.
    """

    candidate: Candidate
    is_open: bool = True
    model: str = ""
    own: int = 0
    others: int = 0
    load: CellLoad | None = None
    load_s: float = 0.0
    feeds: dict[str, Feed] = field(default_factory=dict)
    work: CellWork = field(default_factory=CellWork)

    @property
    def name(self) -> str:
        """The cell's name in the configuration."""
        return self.candidate.name

    def hear(self, load: CellLoad, now_s: float) -> None:
        """Take in a report of load; requests in progress beyond the router's own count as ``others``."""
        self.load, self.load_s = load, now_s
        self.others = max(0, load.running + load.queued - self.own)
        self.candidate.workers = max(1, load.workers)
        self.candidate.is_full = 0 < load.max_queued <= load.queued
        self.candidate.busy = self.own + self.others

    def forget_load(self) -> None:
        """Drop the last report of load, which is too old."""
        self.others, self.candidate.is_full = 0, False
        self.candidate.busy = self.own

    def change_own(self, by: int) -> None:
        """Add ``by`` to the router's own requests in progress."""
        self.own += by
        assert self.own >= 0, "a request ended twice"
        self.candidate.busy = self.own + self.others

    def begin(self, work: int) -> None:
        """Note a request with about so many bytes of its prompt to compute."""
        self.change_own(1)
        self.work.begin(work)
        self.candidate.work = self.work.level

    def sweep(self, passed_s: float) -> None:
        """Let past work decay by ``passed_s`` seconds."""
        self.work.sweep(passed_s)
        self.candidate.work = self.work.level


class Cells:
    """All cells by name, the index of heads, and sessions."""

    def __init__(self, names: Iterable[str], rules: Rules = DEFAULT, *, most_heads: int = 65_536) -> None:
        """Begin with every cell open, and without reports, heads and sessions.

        ``names`` are in the order of the configuration: where cells serve different models under one name, the first
        counts. ``most_heads`` bounds the heads of each gateway of a cell, and of the router's own requests to it.
        """
        self.by_name = {name: CellState(Candidate(name)) for name in names}
        self.index = HeadIndex(most_heads)
        self._rules = rules
        self._sessions: dict[str, str] = {}
        self._mean_bytes = FIRST_MEAN_BYTES
        self._turn = 0
        self._swept_s: float | None = None
        self.other_models: dict[str, str] = {}
        """Cells whose model of some name differs from that of the first cell with one, and a sentence on each.

        Their answers would be another model's, so they get no requests. The first is the first in the configuration,
        also while that cell is away: routers agree, whatever reports each of them got.
        """

    # -- reports ------------------------------------------------------------------------------------------------

    def hear_load(self, load: CellLoad, now_s: float) -> None:
        """Take in a report of a cell's load; cells that are not configured are ignored."""
        cell = self.by_name.get(load.cell)
        feed = self._feed(cell, load.gateway, load.incarnation) if cell is not None else None
        if cell is None or feed is None:
            return
        is_same = cell.load is not None and (cell.load.fingerprint, cell.load.models) == (load.fingerprint, load.models)
        cell.hear(load, now_s)
        if not is_same:
            self.other_models = self._find_other_models()
        more = load.asked_tokens - feed.asked_tokens if feed.asked_tokens is not None else 0
        cell.work.hear(more, load.found_tokens, load.token_bytes)
        cell.candidate.work = cell.work.level
        feed.asked_tokens, feed.load_s = load.asked_tokens, now_s
        if feed.number != load.heads_number:
            feed.wants_whole = True

    def hear_heads(self, heads: CellHeads, now_s: float) -> None:
        """Take in a report of a cell's heads. After a gap, reports are not used until a whole summary has come."""
        cell = self.by_name.get(heads.cell)
        feed = self._feed(cell, heads.gateway, heads.incarnation) if cell is not None else None
        if feed is None:
            return
        source = (heads.cell, heads.gateway)
        if heads.is_first:
            self.index.drop(source)
            feed.wants_whole = False
        elif feed.number + 1 != heads.number:
            feed.wants_whole = True
        feed.number, feed.heads_s = heads.number, now_s
        if feed.wants_whole:
            return
        self.index.remove(source, unpack_heads(heads.removed))
        self.index.add(source, unpack_heads(heads.added), now_s)

    def wanting(self) -> list[str]:
        """Return the open cells from which a whole summary is needed."""
        return [
            cell.name
            for cell in self.by_name.values()
            if cell.is_open and any(feed.wants_whole for feed in cell.feeds.values())
        ]

    def sweep(self, now_s: float) -> None:
        """Forget reports that are too old, and let work decay. Call it about once a second."""
        passed_s = 0.0 if self._swept_s is None else max(0.0, now_s - self._swept_s)
        self._swept_s = now_s
        for cell in self.by_name.values():
            cell.sweep(passed_s)
            if now_s - cell.load_s > STALE_S:
                cell.forget_load()
            for gateway, feed in list(cell.feeds.items()):
                if now_s - max(feed.heads_s, feed.load_s) > FORGET_S:
                    del cell.feeds[gateway]
                    self.index.drop((cell.name, gateway))
            if any(not feed.wants_whole for feed in cell.feeds.values()):
                self.index.expire((cell.name, OWN), now_s - OWN_S)

    def opened(self, name: str) -> None:
        """Note that a gateway of the cell answers."""
        self.by_name[name].is_open = True

    def closed(self, name: str) -> None:
        """Note that no gateway of the cell answers."""
        self.by_name[name].is_open = False

    # -- choices ------------------------------------------------------------------------------------------------

    def choose(self, asked: Asked, *, session: str = "", without: Container[str] = ()) -> Choice | None:
        """Return the cell for a request, or None where no cell is open.

        It is an open one that serves the request's model, if any is known to. ``without`` are cells that have refused
        the request.
        """
        cells = [
            cell
            for cell in self.by_name.values()
            if cell.is_open and cell.name not in without and cell.name not in self.other_models
        ]
        serving = [cell for cell in cells if _serves(cell, asked.model)] or cells
        head = asked.head
        matched = self.index.matches(head)
        # For a new conversation with unknown text the session's name decides, so that all routers choose alike.
        is_new = session and not matched and session not in self._sessions
        key = xxhash.xxh3_64_intdigest(session.encode("utf-8", "replace")) if is_new else self.index.first_unknown(head)
        if not key:  # Prompts too short to have a head are spread in turn.
            key = self._turn = self._turn + 1
        return choose(
            [cell.candidate for cell in serving],
            nbytes=head.nbytes,
            matched=matched,
            mean_bytes=self._mean_bytes,
            key=key,
            session=self._sessions.get(session, ""),
            rules=self._rules,
        )

    def begin(self, choice: Choice, head: Head, now_s: float, *, session: str = "") -> None:
        """Note a request that goes to the chosen cell; its head counts as held there from now on."""
        name = choice.name
        self.by_name[name].begin(head.nbytes - choice.matched)
        # The deepest first, so that none is forgotten before what lies below it.
        self.index.add((name, OWN), reversed(head.digests), now_s)
        if session:
            self._sessions.pop(session, None)
            self._sessions[session] = name
            if len(self._sessions) > MOST_SESSIONS:
                del self._sessions[next(iter(self._sessions))]

    def end(self, name: str, *, answered_bytes: int = 0) -> None:
        """Note the end of a request that was begun; ``answered_bytes`` are those of a prompt that was answered."""
        self.by_name[name].change_own(-1)
        if answered_bytes:
            self._mean_bytes += (answered_bytes - self._mean_bytes) * MEAN_OF

    def models(self) -> dict[str, tuple[str, ...]]:
        """Return the models of each open cell; empty for a cell without a report."""
        return {cell.name: cell.load.models if cell.load else () for cell in self.by_name.values() if cell.is_open}

    def _find_other_models(self) -> dict[str, str]:
        first: dict[str, CellLoad] = {}
        found = {}
        for cell in self.by_name.values():
            if cell.load is None or not cell.load.fingerprint:
                continue
            for model in cell.load.models:
                told = first.setdefault(model, cell.load)
                if told.fingerprint != cell.load.fingerprint:
                    found[cell.name] = (
                        f"its {model} has another configuration, tokenizer, template or weights "
                        f"({cell.load.fingerprint[:8]}) than that of the cell {told.cell} ({told.fingerprint[:8]}); "
                        "it gets no requests"
                    )
        return found

    def _feed(self, cell: CellState, gateway: str, incarnation: str) -> Feed | None:
        """Return a gateway's feed, a new one for a new incarnation; None where there are too many."""
        feed = cell.feeds.get(gateway)
        if feed is None and len(cell.feeds) >= MOST_FEEDS:
            return None
        if feed is None or feed.incarnation != incarnation:
            self.index.drop((cell.name, gateway))
            feed = cell.feeds[gateway] = Feed(incarnation)
        return feed


def _serves(cell: CellState, model: str) -> bool:
    """Return whether a cell may serve a model; a cell that has told none, and a request without a model, fit all."""
    told = cell.load.models if cell.load else ()
    return not model or model in (told or (cell.model or model,))
