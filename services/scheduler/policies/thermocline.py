"""Thermocline: keep the tokens whose loss would cost most per second that they are held.

The value of a token is the Gittins index of its reuse (see :mod:`thermo.law`) times the cost of computing or loading
it again. The law of reuse is learned online from sampled tokens of past requests, evicted ones included. What it
distinguishes is how a prefix is used: the pace of its uses, how often, by which turn of a conversation, how much of
that request was new, how long its answer was, how many continuations it has, whether it ends the prompt, and whether a
later request went another way just above it (then it is as good as dead). Blocks of one conversation come back together
or not at all; so what is known of the request counts for all that it touched, not a count per block.

Where a simple rule does better than what was learned so far, that rule ranks the pool (see :mod:`thermo.duel`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.cache.eviction.policy import Evictable, Moment, Policy, register_policy, size_of
from services.scheduler.policies.thermo.duel import Duel
from services.scheduler.policies.thermo.features import code_of
from services.scheduler.policies.thermo.fit import Fit
from services.scheduler.policies.thermo.law import Law
from services.scheduler.policies.thermo.ranking import Ranking
from services.scheduler.policies.thermo.record import Context, Record
from services.scheduler.policies.thermo.records import Records, head_of
from services.scheduler.policies.thermo.spacing import Spacing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.core.cache.prefix_tree import Node

SAMPLES_PER_REQUEST = 2
EARLY_SAMPLES = 4  # Instead of that in the first EARLY requests, while the law knows little.
EARLY = 1500
FIRST_FIT = 16  # Requests before the law is fitted, and between the tries to do so until enough reuses were seen.
FIT_INTERVAL = 128  # Requests between two fits of the law; the first ones come sooner.
MOST_UNLABELLED = 4096  # Samples that wait for that; of more, the oldest keep the features that they began with.
LABELS = 128  # Samples whose features are corrected in one request; a fit waits until all are.
MEMORY = 12  # Uses over which the pace of a prefix is smoothed.
MOST_LATER = 1024  # Samples of running requests that are looked at once more; others stay as they are.
MOST_RUNNING = 1024  # Requests whose end is waited for; what is known of more is taken for all that there is to know.
HUB_CHILDREN = 16  # A prefix with more continuations is shared by strangers: one says nothing about another.
TICK = 1e-3  # Seconds that a request adds to the clock at least, so that order counts where time stands still.


@register_policy
class ThermoclinePolicy(Policy):
    """Evicts the node of least expected saving per token and second.

    ``cost_depth_tokens`` is the depth at which computing a token costs twice what it does at the top (attention
    grows with depth); 0 takes cost as flat, so that the hit ratio is what is kept high. ``host_cost`` is the cost of
    a token with a copy in a lower tier, relative to one that must be computed.
    """

    name = "thermocline"
    state_version = 2

    cost_depth_tokens: float = 0.0  # Both as measured on the workers, with each request.
    host_cost: float = 1.0
    began_ns: int = -1  # The stream's time at the first request.
    clock: float = 0.0  # Seconds since then.
    requests: int = 0
    fit_at: int = FIRST_FIT
    learned_at: int = -1  # Sequence number of the input in which the last slice of learning was done.
    tokens_seen: int = 0
    spacing: Spacing = msgspec.field(default_factory=Spacing)
    records: Records = msgspec.field(default_factory=Records)
    resident: dict[int, int] = {}  # Digest by node id.
    running: dict[int, list[int]] = {}  # By admission: digests of samples in the duel, to be corrected when it ends.
    newest: int = 0  # The admission that was visited last.
    unlabelled: list[int] = []  # Digests of samples whose features may still change.
    later: list[int] = []  # The same, left for the next fit because their requests run.
    law: Law = msgspec.field(default_factory=Law)
    fit: Fit = msgspec.field(default_factory=Fit)
    duel: Duel = msgspec.field(default_factory=Duel)
    ranking: Ranking = msgspec.field(default_factory=Ranking)

    def visit(self, path: Sequence[Node], prompt_tokens: int, moment: Moment) -> None:
        if self.began_ns < 0:
            self.began_ns = moment.time_ns
        self.clock = max((moment.time_ns - self.began_ns) / 1e9, self.clock + TICK)
        self.cost_depth_tokens, self.host_cost = moment.cost_depth_tokens, moment.host_cost
        if self.requests:
            self.records.release(self.newest)
            self._settle()
        self.requests += 1
        self.tokens_seen += prompt_tokens
        if moment.seq != self.learned_at:  # One input may admit many requests; it does the learning of one.
            self.learned_at = moment.seq
            if self.requests >= self.fit_at:
                self._fit()
            self.fit.advance(self.law)
        # The policy itself holds on to the contexts of those that run, and of the newest.
        number = self.newest = moment.admission or self.requests
        self.records.contexts[number] = Context(self.clock, prompt_tokens, users=2)
        self.running[number] = []
        if len(self.running) > MOST_RUNNING:
            self._leave(next(iter(self.running)))
        above: Record | None = None
        for node in path:
            record = self._record(node.id)
            if record is None:
                continue
            self._reuse(record, number)
            self._sample(record, size_of(node))
            self._follow(above, record)
            above = record

    def ended(self, admission: int, answer_tokens: int) -> None:
        if admission in self.running:
            self.records.contexts[admission].answer = max(answer_tokens, 0)
            self._leave(admission)

    def add(self, node: Node, moment: Moment) -> None:
        records = self.records
        parent = self._record(node.parent)
        number = moment.admission
        if not number or number not in records.contexts:
            number = parent.context if parent is not None else self.newest
        if number not in records.contexts:
            number = 0
            records.contexts.setdefault(0, Context(self.clock, 0))
        record = records.revive(node.end_digest)
        if record is not None:
            self._reuse(record, number)
        else:
            record = self._new_record(node, parent, number)
        self.resident[node.id] = node.end_digest
        self._sample(record, size_of(node))
        self._follow(parent, record)

    def admission_of(self, node: Node) -> int:
        record = self._record(node.id)
        return record.context if record is not None else 0

    def remove(self, node: Node, moment: Moment) -> None:
        self.ranking.withdraw(node.id)
        digest = self.resident.pop(node.id, None)
        if digest is None:
            return
        head = head_of(self.resident.get(node.parent, node.parent), node.tokens)
        self._give_up(self.records.make_ghost(digest, head))

    def split(self, upper: Node, lower: Node) -> None:
        digest = self.resident.get(lower.id)
        if digest is None:
            return
        records = self.records
        record = records.by_digest[digest]
        self._give_up(records.forget(upper.end_digest))
        top = Record(upper.end_digest, record.end - size_of(lower), count=record.count, turn=record.turn)
        top.pace, top.children, top.latest, top.passed = record.pace, 1, digest, record.passed
        records.by_digest[top.digest] = top
        records.bind(top, record.context)
        self.resident[upper.id] = top.digest
        parent = self._record(upper.parent)
        if parent is not None and parent.latest == digest:
            parent.latest = top.digest

    def offer(self, node: Node) -> None:
        record = self._record(node.id)
        if record is not None:
            context = self.records.contexts[record.context]
            self.ranking.offer(node.id, context.last, code_of(record, context), self._cost(node), self.clock, self.law)

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        while True:
            node_id = self.ranking.lowest(self.clock, self.requests, self.law)
            if node_id is None:
                return None
            node = evictable(node_id)
            if node is not None:
                return node

    def prepare(self) -> bool:
        return self.fit.make_ahead()

    def check(self) -> str:
        users = self.records.users()
        users.update(list(self.running))
        users.update([self.newest] if self.requests else [])
        kept = {number: context.users for number, context in self.records.contexts.items()}
        return "" if kept == users else f"requests are referred to as {dict(users)}, and counted as {kept}"

    def _cost(self, node: Node) -> float:
        """Of having to restore a token of the node, relative to computing one at the top. No unit.

        Where requests read the node's tokens in part, it counts as much as they were important (IMPRESS 4.4.2).
        """
        cost = 1.0
        if self.cost_depth_tokens > 0:
            cost += (node.depth + size_of(node) / 2) / self.cost_depth_tokens
        cost *= node.importance
        return cost * self.host_cost if node.host else cost

    def _record(self, node_id: int) -> Record | None:
        digest = self.resident.get(node_id)
        return None if digest is None else self.records.by_digest[digest]

    def _new_record(self, node: Node, parent: Record | None, number: int) -> Record:
        records = self.records
        head = head_of(parent.digest if parent is not None else node.parent, node.tokens)
        ghosts, beyond = records.absorbed(node, parent, head)
        context = records.contexts[number]
        for ghost in ghosts:
            self._reuse(ghost, number)
        record = Record(node.end_digest, node.depth + size_of(node))
        record.turn, record.pace = context.turn, context.pace
        records.bind(record, number)  # Before the ghosts let go of the request: nothing else may refer to it.
        if beyond is not None:
            records.hopes[record.digest] = beyond.digest
        for ghost in ghosts:
            records.ghosts.take(ghost.digest)
            records.release(ghost.context)
        records.by_digest[record.digest] = record
        if parent is not None:
            parent.children += 1
        return record

    def _reuse(self, record: Record, number: int) -> None:
        records = self.records
        gap = max(self.clock - records.contexts[record.context].last, 0.0)
        if record.sample >= 0:
            self._label(record)
            self.law.samples.close(record.sample, self.clock, is_reused=True)
            record.sample = -1
        self.duel.reused(record.digest)
        weight = max(1.0 / max(record.count, record.turn + 1), 1.0 / MEMORY)
        record.pace = gap if record.pace < 0 else record.pace + weight * (gap - record.pace)
        record.count += 1
        record.passed = 0
        records.bind(record, number)
        context = records.contexts[number]
        if record.end > context.known:
            context.known = record.end
            context.turn = record.turn + 1
            context.pace = record.pace
            context.branches = record.children + 1

    def _follow(self, parent: Record | None, record: Record) -> None:
        """A request went from parent to this record: where the one before it went is passed by."""
        if parent is None:
            return
        previous = parent.latest
        parent.latest = record.digest
        if previous in (0, record.digest) or parent.children >= HUB_CHILDREN:
            return
        passed = 1 + (parent.children > 2) + (parent.children > 4) + (parent.children > 8)
        while previous:
            left = self.records.find(previous)
            if left is None or left.passed or left.digest == record.digest:
                return
            self._pass(left, passed)
            previous = left.latest

    def _pass(self, record: Record, passed: int) -> None:
        begin = self.law.samples.begun(record.sample) if record.sample >= 0 else -1.0
        if begin >= 0:
            self._label(record)
            self.law.samples.close(record.sample, self.clock, is_reused=False)
        record.passed = passed
        code = self._code(record)
        self.duel.changed(record.digest, code)
        if begin >= 0:
            record.sample = self.law.samples.open(begin, self.clock, code)
        self.records.changed(record)

    def _give_up(self, forgotten: Record | None) -> None:
        """Watch a prefix no longer, of which nothing is remembered from now on."""
        if forgotten is not None:
            self.law.samples.close(forgotten.sample, self.clock, is_reused=False)

    def _code(self, record: Record) -> int:
        return code_of(record, self.records.contexts[record.context])

    def _sample(self, record: Record, size: int) -> None:
        """Watch a few tokens of each request, evenly spread over all that are used, for the duel and for the law."""
        if not self.requests:
            return  # What the pool was filled with was used by nobody, as far as is known.
        self.duel.used(record.digest, size)
        rate = EARLY_SAMPLES if self.requests < EARLY else SAMPLES_PER_REQUEST
        if not self.spacing.picks(size, self.tokens_seen / self.requests / rate):
            return
        record.sample = self.law.samples.open(self.clock, self.clock, self._code(record))
        self.unlabelled.append(record.digest)
        if len(self.unlabelled) > MOST_UNLABELLED:
            del self.unlabelled[: MOST_UNLABELLED // 2]

    def _leave(self, admission: int) -> None:
        """All is known of a request that will ever be."""
        for digest in self.running.pop(admission):
            record = self.records.find(digest)
            if record is not None and record.context == admission:
                self.duel.changed(digest, self._code(record))
        self.records.release(admission)

    def _settle(self) -> None:
        """Behind the request before this one: its samples enter the duel, which says what is ranked by from now on."""
        duel, records = self.duel, self.records
        for digest in duel.entering:
            record = records.find(digest)
            if record is not None:
                context = records.contexts[record.context]
                duel.enter(digest, context.last, code_of(record, context))
                if record.context in self.running:
                    self.running[record.context].append(digest)
        duel.entering = []
        mean = max(self.tokens_seen / self.requests, 1.0)
        rule = duel.settle(self.capacity, mean, max(self.clock, TICK) / self.requests, self.clock, self.law)
        self.ranking.follow(rule, duel.shadows.turnover_s)

    def _label(self, record: Record) -> None:
        if record.sample >= 0:
            self.law.samples.relabel(record.sample, self._code(record))

    def _fit(self) -> None:
        """Begin a fit once the features of all new samples are as they should be, a few in each request."""
        if self.fit.stage:
            return
        labelled, self.unlabelled = self.unlabelled[:LABELS], self.unlabelled[LABELS:]
        for digest in labelled:
            record = self.records.find(digest)
            if record is not None:
                self._label(record)
                if record.context in self.running and len(self.later) < MOST_LATER:
                    self.later.append(digest)
        if not self.unlabelled:
            self.unlabelled, self.later = self.later, []
            is_begun = self.fit.start(self.law, self.clock)
            self.fit_at = self.requests + (min(FIT_INTERVAL, self.requests) if is_begun else FIRST_FIT)
