"""Thermocline: keep the tokens whose loss would cost most per second that they are held.

The value of a token is the Gittins index of its reuse (see :mod:`thermo.law`) times the cost of computing or loading
it again. The law of reuse is learned online from sampled tokens of past requests, evicted ones included. It
distinguishes how a prefix is used: the pace of its uses, how often, by which turn of a conversation, how much of that
request was new, how long its answer was, how many continuations it has, whether it ends the prompt, and whether a
later request went another way just above it (then it is as good as dead). Blocks of one conversation come back together
or not at all; so the request's features count for all that it touched, not a count per block.

Where a simple rule does better than what was learned so far, that rule ranks the pool (see :mod:`thermo.duel`).

Pools of one tier learn together: one of them leads, and what it learns ranks them all (see :mod:`thermo.learner`).
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np

from services.scheduler.core.cache.eviction.policy import Evictable, Moment, Policy, register_policy, size_of
from services.scheduler.core.cache.prefix_tree import HEAD_TOKENS
from services.scheduler.policies.thermo.columns import decoded, encoded
from services.scheduler.policies.thermo.features import code_of, code_of_request, code_with
from services.scheduler.policies.thermo.learner import MOST_LATER, NOBODY, Learner
from services.scheduler.policies.thermo.path_uses import MEMORY, PathUses
from services.scheduler.policies.thermo.prefixes import NO_SAMPLE, Prefixes, head_of
from services.scheduler.policies.thermo.ranking import Ranking
from services.scheduler.policies.thermo.rules import MOST_USES
from shared.errors import CodecError
from shared.undecodable import UNDECODABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from services.scheduler.core.cache.prefix_tree import Node

LONG_PATH = 64  # Nodes from which on arrays are faster than a loop.
MOST_RUNNING = 1024  # Requests whose end is awaited; beyond it the oldest count as ended.
MOST_OFFERED = 64  # Offered nodes that wait to be ranked; with more, all are ranked at once.
HUB_CHILDREN = 16  # A prefix with at least this many continuations is shared by strangers: one says nothing of another.
_MOST_ANSWER = 2**31 - 1
_IDS, _PARENTS, _DEPTHS = map(attrgetter, ("id", "parent", "depth"))
TICK = 1e-3  # Least seconds that a request adds to the clock, so that order counts where time stands still.


@register_policy
class ThermoclinePolicy(Policy):
    """The default policy: evicts the node of least expected saving per token and second.

    ``cost_depth_tokens`` is the depth at which computing a token costs twice what it does at the top (attention
    grows with depth); 0 takes cost as flat, which maximises the hit ratio. ``host_cost`` is the cost of a token with a
    copy in a lower tier, relative to one that must be computed; ``lent_cost`` that of one with a copy on another node,
    which is lent again (a sole copy is worth more: Dahlin et al., OSDI 1994, 2.4).
    """

    name = "thermocline"
    state_version = 5

    cost_depth_tokens: float = 0.0  # This and the next two are as measured on the workers, updated with each request.
    host_cost: float = 1.0
    lent_cost: float = 1.0
    clock: float = 0.0  # Seconds since the learner began.
    requests: int = 0
    tokens_seen: int = 0
    prefixes: Prefixes = msgspec.field(default_factory=Prefixes)
    offered: dict[int, float] = {}  # Cost by node id, of nodes that are to be ranked before the next victim.
    running: dict[int, list[int]] = {}  # By admission: digests of samples in the duel, to be corrected at its end.
    newest: int = 0  # Number of the last admission.
    ranking: Ranking = msgspec.field(default_factory=Ranking)
    member: int = 0  # Number of this pool among those that learn together.
    learner: Learner = msgspec.field(default_factory=Learner)  # Shared by them; encoded with the one that leads.

    def visit(self, path: Sequence[Node], prompt_tokens: int, moment: Moment) -> None:
        """Advance the clock, settle the request before, learn if this pool leads, and note the path's reuse."""
        learner = self.learner
        if learner.began_ns < 0:
            learner.began_ns = moment.time_ns
        self.clock = max((moment.time_ns - learner.began_ns) / 1e9, self.clock + TICK)
        self.cost_depth_tokens, self.host_cost = moment.cost_depth_tokens, moment.host_cost
        self.lent_cost = moment.lent_cost
        contexts = self.prefixes.contexts
        leads = learner.is_led_by(self.member, self.requests)
        if self.requests:
            contexts.release(contexts.find(self.newest))
            if leads:
                self._settle()
            self.ranking.follow(learner.duel.rule, learner.duel.shadows.turnover_s)
        self.requests += 1
        self.tokens_seen += prompt_tokens
        if leads:
            learner.requests += 1
            if moment.seq != learner.learned_at:  # One input may admit many requests; it does the learning of one.
                learner.learned_at = moment.seq
                if learner.is_fit_due():
                    self._fit()
                learner.fit.advance(learner.law)
        # The policy itself holds on to the contexts of those that run, and of the newest.
        number = self.newest = moment.admission or self.requests
        context = contexts.open(number, self.clock, prompt_tokens, users=2)
        self.running[number] = []
        if len(self.running) > MOST_RUNNING:
            self._leave(next(iter(self.running)))
        self._reuse_path(path, context)

    def ended(self, admission: int, answer_tokens: int) -> None:
        """Note the length of the answer, and correct the features of the request's samples."""
        if admission in self.running:
            contexts = self.prefixes.contexts
            contexts.answer[contexts.find(admission)] = min(max(answer_tokens, 0), _MOST_ANSWER)
            self._leave(admission)

    def add(self, node: Node, moment: Moment) -> None:
        """Revive the prefix if it is a ghost, which is a reuse; otherwise open a row for it, and sample it."""
        prefixes = self.prefixes
        parent = prefixes.of_node(node.parent)
        context = self._context_for(moment.admission, parent)
        row = prefixes.find(node.end_digest)
        if row:
            prefixes.revive(row, node.id)
            self._reuse(((row, size_of(node)),), context, parent)
        else:
            row = self._new_prefix(node, parent, context)
            self._sample(row, size_of(node))
            self._follow(parent, row)

    def admission_of(self, node: Node) -> int:
        """Return the admission of the request that used the node last; 0 where that is not known."""
        return self.prefixes.contexts.number[self.prefixes.context[self.prefixes.of_node(node.id)]]

    def remove(self, node: Node, moment: Moment) -> None:
        """Make the node's prefix a ghost, and forget the oldest ghost beyond the limit."""
        self.offered.pop(node.id, None)
        prefixes = self.prefixes
        row = prefixes.of_node(node.id)
        if row:
            self.ranking.withdraw(row, node.id)
            prefixes.make_ghost(row)
            self._give_up(prefixes.oldest())

    def split(self, upper: Node, lower: Node) -> None:
        """Open a row for the upper part with the features of the whole; the lower part keeps its row."""
        prefixes = self.prefixes
        row = prefixes.of_node(lower.id)
        if not row:
            return
        digest = prefixes.digest[row]
        self._give_up(prefixes.find(upper.end_digest))
        top = prefixes.open(upper.end_digest, prefixes.head[row], upper.id, prefixes.end[row] - size_of(lower))
        prefixes.head[row] = head_of(upper.end_digest, lower.tokens_between(0, HEAD_TOKENS))
        for column in (prefixes.count, prefixes.turn, prefixes.passed):
            column[top] = column[row]
        prefixes.pace[top], prefixes.children[top], prefixes.latest[top] = prefixes.pace[row], 1, digest
        prefixes.bind(top, prefixes.context[row])
        parent = prefixes.of_node(upper.parent)
        if parent and prefixes.latest[parent] == digest:
            prefixes.latest[parent] = upper.end_digest

    def offer(self, node: Node) -> None:
        """Note the node and its cost; ranked with others, at the latest before the next victim."""
        self.offered[node.id] = self._cost(node)
        if len(self.offered) > MOST_OFFERED:
            self._rank_offered()

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        """Return the evictable node of lowest score, by the rule in force."""
        while True:
            if self.offered:
                self._rank_offered()
            node_id = self.ranking.lowest(self.clock, self.requests, self.learner.law)
            if node_id is None:
                return None
            node = evictable(node_id)
            if node is not None:
                return node

    def prepare(self) -> bool:
        """Let the duel's caches evict, or make a slice of the next index ahead, if this pool leads.

        Return whether there was anything to do.
        """
        learner = self.learner
        return self.leads and (learner.duel.evict(self.capacity, self.clock, learner.law) or learner.fit.make_ahead())

    @property
    def leads(self) -> bool:
        """Whether the tier's pools learn from the requests of this one."""
        return self.learner.leader == self.member

    def join(self, others: Sequence[Policy]) -> None:
        """Share the learner of the pool that leads, with a number of its own unless it was decoded with one."""
        for other in others:
            if isinstance(other, ThermoclinePolicy) and other.leads:
                if self.learner is not other.learner and self.learner.leader != NOBODY:
                    other.learner.members += 1
                    self.member = other.learner.members
                self.learner = other.learner
                return

    def leave(self, others: Sequence[Policy]) -> None:
        """Hand the lead over to the pool with most requests, if this one had it, and close the law's samples."""
        heirs = [other for other in others if isinstance(other, ThermoclinePolicy) and other is not self]
        if self.leads and heirs:
            heir = max(heirs, key=attrgetter("requests"))
            self.learner.hand_over(heir.member, heir.requests)
            self.learner.law.samples.close_all(self.clock)

    def encode(self) -> bytes:
        """Return the policy's bytes; those of a pool that does not lead are without the learner."""
        return _ENCODER.encode(self if self.leads else msgspec.structs.replace(self, learner=Learner(leader=NOBODY)))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Undo :meth:`encode`; :meth:`join` must follow. Raises CodecError for bytes that it did not make."""
        try:
            return msgspec.msgpack.decode(data, type=cls, dec_hook=decoded)
        except UNDECODABLE as error:
            raise CodecError(f"not a state of policy {cls.name!r}: {error}") from error

    def check(self) -> str:
        """Count the references to requests from scratch; return how they contradict the kept counts, or ""."""
        contexts = self.prefixes.contexts
        users = self.prefixes.users()
        users.update([contexts.find(number) for number in self.running])
        users.update([contexts.find(self.newest)] if self.requests else [])
        kept = {row: count for row, count in enumerate(contexts.users) if count and row}
        return "" if kept == users else f"requests are referred to as {dict(users)}, and counted as {kept}"

    def _cost(self, node: Node) -> float:
        """Return the cost of restoring a token of the node, relative to computing one at the top. No unit.

        Where requests read the node's tokens in part, it is weighted by their importance (IMPRESS 4.4.2).
        """
        cost = 1.0
        if self.cost_depth_tokens > 0:
            cost += (node.depth + size_of(node) / 2) / self.cost_depth_tokens
        if len(node.host) > 1 and self.lent_cost < 1 and not node.rare.is_sealed:
            cost = min(cost, self.lent_cost) / len(node.host)
        cost *= node.importance
        return cost * self.host_cost if node.host else cost

    def _context_for(self, number: int, parent: int) -> int:
        """Return the row of that admission's request, else of the parent's last one, else of the newest."""
        contexts = self.prefixes.contexts
        context = contexts.find(number) if number else self.prefixes.context[parent]
        context = context or self.prefixes.context[parent] or contexts.find(self.newest)
        return context or contexts.open(0, self.clock, 0, users=0)

    def _rank_offered(self) -> None:
        prefixes, ranking, law = self.prefixes, self.ranking, self.learner.law
        contexts = prefixes.contexts
        latest, of_request, last = -1, 0, 0.0  # Nodes that one request used are often offered together.
        for node_id, cost in self.offered.items():
            row = prefixes.of_node(node_id)
            if row:
                context = prefixes.context[row]
                if context != latest:
                    latest, of_request, last = context, code_of_request(contexts, context), contexts.last[context]
                ranking.offer(row, node_id, last, code_with(prefixes, row, of_request), cost, self.clock, law)
        self.offered = {}

    def _new_prefix(self, node: Node, parent: int, context: int) -> int:
        prefixes = self.prefixes
        first = node.tokens_between(0, HEAD_TOKENS)
        head = head_of(prefixes.digest[parent] if parent else node.parent, first)
        ghosts, beyond = prefixes.absorbed(node, parent, head)
        self._reuse([(ghost, 0) for ghost in ghosts], context, is_path=False)
        row = prefixes.open(node.end_digest, head, node.id, node.depth + size_of(node))
        contexts = prefixes.contexts
        prefixes.turn[row], prefixes.pace[row] = contexts.turn[context], contexts.pace[context]
        prefixes.bind(row, context)  # Before the ghosts release the request: nothing else may refer to it.
        if beyond:
            prefixes.hopes[row] = prefixes.digest[beyond]
        for ghost in ghosts:
            prefixes.forget(ghost)
        if parent and prefixes.children[parent] < MOST_USES:
            prefixes.children[parent] += 1
        return row

    def _reuse_path(self, path: Sequence[Node], context: int) -> None:
        """Note that the nodes of a path are used again, top first.

        Of a long path, nodes at which nothing but the use happens are written together; for each of the others, what
        :meth:`_reuse` does is done here, too.
        """
        prefixes, learner = self.prefixes, self.learner
        if len(path) < LONG_PATH:
            of_node = prefixes.of_node
            self._reuse([(row, size_of(node)) for node in path if (row := of_node(node.id))], context)
            return
        rows, sizes = prefixes.of_nodes(np.fromiter(map(_IDS, path), np.uint64, len(path))), _sizes(path)
        is_known = rows != 0
        uses = PathUses(prefixes, rows[is_known], context, self.clock)
        if not uses.rows or context in uses.befores:
            self._reuse(list(zip(uses.rows, sizes[is_known].tolist(), strict=True)), context)
            return
        of_duel, of_law, is_watched = learner.duel.spacing, learner.spacing, self.leads and self.requests > 0
        shadows = [each for each in (learner.duel.shadows, learner.duel.scouts) if self.leads and each is not None]
        noted, ends = uses.noted(prefixes, [shadow.rows for shadow in shadows]), np.cumsum(sizes[is_known]).tolist()
        places, last = iter(noted), len(uses.rows)
        at, done, place = 0, 0, next(places)
        while at < last:
            while place < at:
                place = next(places)
            following = place
            if is_watched:
                following = _first_reached(ends, at, place, min(of_duel.left, of_law.left), done)
                passed = ends[following - 1] - done if following > at else 0
                of_duel.left -= passed  # Of whole numbers the differences are exact.
                of_law.left -= passed
                done += passed
            if following == last:
                break
            row, digest, size = uses.rows[following], uses.digests[following], ends[following] - done
            if prefixes.sample[row] != NO_SAMPLE:
                self._close_sample(row)
            for shadow in shadows:
                if digest in shadow.rows:
                    shadow.reused(digest)
            uses.take(prefixes, following)
            if is_watched and of_duel.left > size and of_law.left > size:
                of_duel.left -= size
                of_law.left -= size
            elif is_watched:
                self._sample(row, size)
            if following:
                self._follow(uses.rows[following - 1], row)
            at, done = following + 1, ends[following]
        uses.take_all(prefixes)

    def _reuse(self, used: Sequence[tuple[int, int]], context: int, above: int = 0, *, is_path: bool = True) -> None:
        """Note that prefixes, given by row and size, are used again.

        On a path each goes on from the one before, the first one from ``above``, and some of its tokens are sampled.
        """
        prefixes, learner, clock, leads = self.prefixes, self.learner, self.clock, self.leads
        contexts, duel = prefixes.contexts, learner.duel
        digests, latest, samples, bound = prefixes.digest, prefixes.latest, prefixes.sample, prefixes.context
        counts, turns, paces, passed = prefixes.count, prefixes.turn, prefixes.pace, prefixes.passed
        lasts, users = contexts.last, contexts.users
        shadows = [shadow for shadow in (duel.shadows, duel.scouts) if leads and shadow is not None]
        is_watched, of_duel, of_law = is_path and leads and self.requests > 0, duel.spacing, learner.spacing
        for row, size in used:
            if samples[row] != NO_SAMPLE:
                self._close_sample(row)
            digest, before = digests[row], bound[row]
            for shadow in shadows:
                if digest in shadow.rows:
                    shadow.reused(digest)
            gap = clock - lasts[before]
            gap = gap if gap > 0.0 else 0.0
            count, turn, pace = counts[row], turns[row], paces[row]
            uses = count if count > turn else turn + 1
            paces[row] = gap if pace < 0 else pace + (1 / uses if uses < MEMORY else 1 / MEMORY) * (gap - pace)
            if count < MOST_USES:
                counts[row] = count + 1
            passed[row] = 0
            if before != context:
                users[context] += 1
                if users[before] > 1:
                    users[before] -= 1
                else:
                    contexts.release(before)
                bound[row] = context
            if prefixes.end[row] > contexts.known[context]:
                contexts.known[context] = prefixes.end[row]
                contexts.turn[context] = turn + 1 if turn < MOST_USES else MOST_USES
                contexts.pace[context] = paces[row]
                contexts.branches[context] = min(prefixes.children[row] + 1, MOST_USES)
            if is_watched and of_duel.left > size and of_law.left > size:  # None of its tokens is picked.
                of_duel.left -= size
                of_law.left -= size
            elif is_watched:
                self._sample(row, size)
            if is_path and above and latest[above] != digest:
                self._follow(above, row)
            above = row

    def _close_sample(self, row: int) -> None:
        """Close a sample whose prefix was used again before it was given up."""
        self._label(row)
        self.learner.law.samples.close(self.prefixes.sample[row], self.clock, is_reused=True)
        self.prefixes.sample[row] = NO_SAMPLE

    def _follow(self, parent: int, row: int) -> None:
        """Note that a request continued ``parent`` with this prefix: the continuation used before is passed by."""
        if not parent:
            return
        prefixes = self.prefixes
        previous, digest = prefixes.latest[parent], prefixes.digest[row]
        if previous == digest:
            return
        prefixes.latest[parent] = digest
        children = prefixes.children[parent]
        if not previous or children >= HUB_CHILDREN:
            return
        passed = 1 + (children > 2) + (children > 4) + (children > 8)
        while previous:
            left = prefixes.find(previous)
            if not left or left == row or prefixes.passed[left]:
                return
            self._pass(left, passed)
            previous = prefixes.latest[left]

    def _pass(self, row: int, passed: int) -> None:
        prefixes, samples = self.prefixes, self.learner.law.samples
        sample = prefixes.sample[row]
        begin = samples.begun(sample) if sample != NO_SAMPLE else -1.0
        if begin >= 0:
            self._label(row)
            samples.close(sample, self.clock, is_reused=False)
        prefixes.passed[row] = passed
        if self.leads:
            self.learner.duel.changed(prefixes, row)
        if begin >= 0:
            prefixes.sample[row] = samples.open(begin, self.clock, code_of(prefixes, row))

    def _give_up(self, row: int) -> None:
        """Stop watching a ghost, which is forgotten from now on; row 0 is none."""
        if row:
            sample = self.prefixes.sample[row]
            if sample != NO_SAMPLE:
                self.learner.law.samples.close(sample, self.clock, is_reused=False)
            self.prefixes.forget(row)

    def _sample(self, row: int, size: int) -> None:
        """Watch a few tokens of each request, evenly spread over all that are used, for the duel and for the law."""
        if not self.requests or not self.leads:
            return  # Before the first request, nodes fill the pool without a known use.
        prefixes, learner = self.prefixes, self.learner
        learner.duel.used(prefixes.digest[row], size)
        if learner.picks(size, self.tokens_seen / self.requests):
            prefixes.sample[row] = learner.sample(prefixes.digest[row], self.clock, code_of(prefixes, row))

    def _leave(self, admission: int) -> None:
        """Forget a request that ended: correct its samples in the duel, and release its row."""
        prefixes = self.prefixes
        context = prefixes.contexts.find(admission)
        for digest in self.running.pop(admission):
            row = prefixes.find(digest)
            if row and prefixes.context[row] == context:
                self.learner.duel.changed(prefixes, row)
        prefixes.contexts.release(context)

    def _settle(self) -> None:
        """Enter the samples of the request before this one into the duel, which chooses the rule from now on."""
        duel, prefixes, law = self.learner.duel, self.prefixes, self.learner.law
        for digest, weight in duel.entering:
            row = prefixes.find(digest)
            if row:
                context = prefixes.context[row]
                duel.enter(digest, prefixes.contexts.last[context], code_of(prefixes, row), weight)
                held = self.running.get(prefixes.contexts.number[context])
                if held is not None:
                    held.append(digest)
        duel.entering = []
        mean = max(self.tokens_seen / self.requests, 1.0)
        duel.settle(self.capacity, mean, max(self.clock, TICK) / self.requests, self.clock, law)

    def _label(self, row: int) -> None:
        sample = self.prefixes.sample[row]
        if sample != NO_SAMPLE:
            self.learner.law.samples.relabel(sample, code_of(self.prefixes, row))

    def _fit(self) -> None:
        """Begin a fit once the features of all new samples are corrected, a few in each request."""
        prefixes, learner = self.prefixes, self.learner
        for digest in learner.to_label():
            row = prefixes.find(digest)
            if row:
                self._label(row)
                if prefixes.contexts.number[prefixes.context[row]] in self.running and len(learner.later) < MOST_LATER:
                    learner.later.append(digest)
        learner.try_fit(self.clock)


def _first_reached(ends: list[int], start: int, stop: int, left: float, done: int) -> int:
    """Return the first place from ``start`` on whose end is ``left`` or more behind ``done``, or ``stop``."""
    place = bisect_left(ends, left + done, start, stop)
    while place > start and ends[place - 1] - done >= left:  # The sum may have been rounded.
        place -= 1
    while place < stop and ends[place] - done < left:
        place += 1
    return place


def _sizes(path: Sequence[Node]) -> NDArray[np.int64]:
    """Return the tokens of each node's own span (int64)."""
    if list(map(_PARENTS, path[1:])) != list(map(_IDS, path[:-1])):  # Some nodes of the path are not in the pool.
        return np.fromiter(map(size_of, path), np.int64, len(path))
    depths = np.fromiter([*map(_DEPTHS, path), path[-1].end], np.int64, len(path) + 1)
    return depths[1:] - depths[:-1]


_ENCODER = msgspec.msgpack.Encoder(enc_hook=encoded)
