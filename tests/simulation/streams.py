"""The two streams of a simulated cell, which lose nothing, and core messages, which may be lost.

``TC_INPUTS`` gives each input its number and time. ``TC_OUTPUTS`` keeps what the scheduler said, by target, so that
who missed something can read it there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.bus.protocol import StreamMessage
from shared.codec import Input, Published, decode_published, encode
from tests.simulation.scenario import Rates
from tests.simulation.virtual_clock import VirtualClock

DEDUPLICATED_NS = 120_000_000_000
"""So long the stream knows a message's id."""


class InputStream:
    """Inputs in order. ``on_append`` is called after each. Stamps are of the broker's clock, which may be set."""

    def __init__(self, clock: VirtualClock) -> None:
        self.messages: list[StreamMessage] = []
        self.on_append: Callable[[], None] = lambda: None
        self.ahead_ns = 0  # Of the broker's clock.
        self._clock = clock
        self._ids: dict[str, tuple[int, int]] = {}  # When and where each was stored last.

    def append(self, message: Input, message_id: str = "") -> int:
        """Store an input, and return its place; one whose id was seen lately is stored already."""
        now_ns = self._clock.now_ns
        if message_id:
            stored_ns, seq = self._ids.get(message_id, (-DEDUPLICATED_NS, 0))
            if now_ns - stored_ns < DEDUPLICATED_NS:
                return seq
            self._ids[message_id] = now_ns, len(self.messages) + 1
        self.messages.append(StreamMessage(len(self.messages) + 1, now_ns + self.ahead_ns, "in", encode(message)))
        self.on_append()
        return len(self.messages)


@dataclass
class OutputStream:
    """What every target was told, in order, repeats included."""

    said: dict[str, list[Published]] = field(default_factory=dict)

    def append(self, target: str, data: bytes) -> Published:
        """Store an output; returns it as its target decodes it."""
        output = decode_published(data)
        self.said.setdefault(target, []).append(output)
        return output


class Link:
    """Core messages: each may be lost, late or come twice. Those of one channel overtake one another now and then."""

    def __init__(self, clock: VirtualClock, rates: Rates, chance: random.Random) -> None:
        self._clock = clock
        self._rates = rates
        self._chance = chance
        self._last_ns: dict[str, int] = {}

    def send(
        self, channel: str, deliver: Callable[[], None], *, may_be_lost: bool = True, may_repeat: bool = True
    ) -> None:
        """Let ``deliver`` be called, some time later, once, twice or not at all."""
        copies = 1
        if may_be_lost and self._chance.random() < self._rates.loss:
            copies = 0
        elif self._chance.random() < self._rates.duplicate and may_repeat:
            copies = 2
        for _ in range(copies):
            delay_us = self._chance.randint(20, 20 + self._rates.most_delay_us)
            at_ns = self._clock.now_ns + delay_us * 1_000
            # Events wait for one another; core messages of two connections, or after a new one, need not.
            if not may_be_lost or not self._rates.overtaking or self._chance.random() >= self._rates.overtaking:
                at_ns = max(self._last_ns.get(channel, 0), at_ns)
                self._last_ns[channel] = at_ns
            self._clock.at(at_ns, deliver)
