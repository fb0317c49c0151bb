"""W-TinyLFU (Einziger, Friedman and Manes 2017): a newcomer stays only if it is used more than what it displaces.

Newcomers enter a small window in order of use. A node that the window pushes out meets the main part's next victim,
and the one that a sketch has seen more often lately stays. The main part is a segmented LRU.

A node that the window pushes out and that cannot go, because it has children, waits in ``passed``: the contest is
held as soon as it may go, unless a use brings it back into the window. While the main part is smaller than its share,
the winner of a contest enters without displacing another node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.cache.eviction import Evictable, Moment, register_policy, size_of
from services.scheduler.policies.baselines.queue import NodeQueue, ScannedQueue, move
from services.scheduler.policies.baselines.queued import QueuedPolicy
from services.scheduler.policies.baselines.sketch import FrequencySketch, make_sketch
from services.scheduler.policies.baselines.slru import PROTECTED_SHARE, Segments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.core.cache.prefix_tree import Node

WINDOW_SHARE = 0.01
_NODE_TOKENS = 64  # A guess at a small node, which sizes the sketch.
_SAMPLE_PER_NODE = 10  # The sketch remembers this many uses for each resident node.
_LEAST_SAMPLE = 1000


@register_policy
class WTinyLfuPolicy(QueuedPolicy):
    """W-TinyLFU. ``is_full``: room had to be made since the pool was last half empty; before, the window overflows."""

    name = "w-tinylfu"

    window: ScannedQueue = msgspec.field(default_factory=ScannedQueue)
    passed: NodeQueue = msgspec.field(default_factory=NodeQueue)
    main: Segments = msgspec.field(default_factory=Segments)
    sketch: FrequencySketch = msgspec.field(default_factory=FrequencySketch)
    is_full: bool = False

    def queues(self) -> tuple[NodeQueue, ...]:
        """Return both segments of the main part, the window, and the nodes that it passed over."""
        return (self.main.probation, self.main.protected, self.window, self.passed)

    def visit(self, path: Sequence[Node], prompt_tokens: int, moment: Moment) -> None:
        """Count a use of each node, children first, and renew it; one in ``passed`` goes back to the window."""
        for node in reversed(path):
            self._see(node)
            if node.id in self.window.places:
                self.window.renew(node.id)
            elif node.id in self.passed.places:
                move(node.id, self.passed, self.window)
            else:
                self.main.use(node.id, self._main_share() * PROTECTED_SHARE)

    def add(self, node: Node, moment: Moment) -> None:
        """Count the newcomer and append it to the window, which overflows into the main part until full."""
        self._see(node)
        self.window.append(node.id, size_of(node))
        if self.is_full and 2 * sum(queue.tokens for queue in self.queues()) <= self.capacity:
            self.is_full = False
        while not self.is_full and self.window.tokens > self.capacity * WINDOW_SHARE:
            oldest = self.window.front()
            assert oldest is not None
            move(oldest, self.window, self.main.probation)

    def remove(self, node: Node, moment: Moment) -> None:
        """Take the node out of its queue; the sketch still remembers it."""
        for queue in self.queues():
            queue.take_out(node.id)

    def split(self, upper: Node, lower: Node) -> None:
        """Give both parts the place of the whole, and count both as seen as often."""
        super().split(upper, lower)
        # A cut changes what a part is remembered by; both were seen as often as the whole was.
        seen = max(self.sketch.estimate(upper.digest), self.sketch.estimate(lower.digest))
        self.sketch.raise_to(upper.digest, seen)
        self.sketch.raise_to(lower.digest, seen)

    def victim(self, evictable: Evictable, moment: Moment) -> Node | None:
        """Return the loser of a contest between the window's candidate and the main part's next victim.

        A candidate whose estimate is not higher loses. Without a candidate it is the main part's victim, else the
        oldest evictable node of ``passed`` or the window.
        """
        self.is_full = True
        while (candidate := self._candidate(evictable)) is not None:
            rival = self.main.first_evictable(evictable)
            if rival is not None and self.sketch.estimate(candidate.digest) <= self.sketch.estimate(rival.digest):
                self.offer(rival)
                return candidate
            has_room = self.main.tokens + self.passed.tokens + size_of(candidate) <= self._main_share()
            if rival is None and not has_room:
                return candidate
            queue = self.passed if candidate.id in self.passed.places else self.window
            move(candidate.id, queue, self.main.probation)
            self.offer(candidate)
            if rival is not None and not has_room:
                return rival
            if rival is not None:
                self.offer(rival)
        return (
            self.main.first_evictable(evictable)
            or self.passed.first_evictable(evictable)
            or self.window.first_evictable(evictable)
        )

    def _candidate(self, evictable: Evictable) -> Node | None:
        """Return a node that the window pushes out and that may go, or None while it is within its share."""
        waiting = self.passed.first_evictable(evictable)
        if waiting is not None:
            return waiting
        while self.window.tokens >= self.capacity * WINDOW_SHARE:
            oldest = self.window.front()
            if oldest is None:
                break
            node = evictable(oldest)
            if node is not None:
                return node
            move(oldest, self.window, self.passed)
        return None

    def _see(self, node: Node) -> None:
        if not self.sketch.bits:
            self.sketch = make_sketch(self.capacity // _NODE_TOKENS)
        resident = sum([len(queue.places) for queue in self.queues()])
        self.sketch.count(node.digest, max(_LEAST_SAMPLE, _SAMPLE_PER_NODE * resident))

    def _main_share(self) -> float:
        return self.capacity * (1 - WINDOW_SHARE)
