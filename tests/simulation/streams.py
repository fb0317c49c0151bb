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
    """Inputs in order. ``on_append`` is called after each."""

    def __init__(self, clock: VirtualClock) -> None:
        self.messages: list[StreamMessage] = []
        self.on_append: Callable[[], None] = lambda: None
        self._clock = clock
        self._ids: dict[str, int] = {}

    def append(self, message: Input, message_id: str = "") -> None:
        """Store an input; one whose id was seen lately is stored already."""
        now_ns = self._clock.now_ns
        if message_id:
            if now_ns - self._ids.get(message_id, -DEDUPLICATED_NS) < DEDUPLICATED_NS:
                return
            self._ids[message_id] = now_ns
        self.messages.append(StreamMessage(len(self.messages) + 1, now_ns, "in", encode(message)))
        self.on_append()


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
    """Core messages: each may be lost, late or come twice; those of one channel never overtake one another."""

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
            at_ns = max(self._last_ns.get(channel, 0), self._clock.now_ns + delay_us * 1_000)
            self._last_ns[channel] = at_ns
            self._clock.at(at_ns, deliver)
