"""A session that grows turn by turn: time outside the model, bytes on streams, and schedulers' processor time."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from bench.emptying import rest
from bench.long_prompts.asking import Asker, Sample
from bench.long_prompts.figures import of_samples, spread
from bench.long_prompts.model import Texts
from bench.long_prompts.servers import model_name
from bench.peers.processor_time import used_s
from services.gateway.cache_calls import CacheCalls
from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from thermocline.supervisor.api import RunningCell

ANSWER_TOKENS = 64
LAST_TURNS = 10
BYTES_A_TURN, BYTES_A_TOKEN = 10_240, 4
"""What a turn may put on the streams at the most: so many bytes, and so many for each of its new tokens."""

OUTSIDE = 10.0
"""Target: time outside the model before, over now."""

STREAMS = {"inputs": subjects.INPUTS_STREAM, "outputs": subjects.OUTPUTS_STREAM}


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn took. ``new_tokens`` are those that no turn before it had, its answer included."""

    sample: Sample
    new_tokens: int
    nbytes: dict[str, int]

    @property
    def of_allowed(self) -> float:
        """Bytes that were allowed over bytes that came."""
        return (BYTES_A_TURN + BYTES_A_TOKEN * self.new_tokens) / sum(self.nbytes.values())


class Streams:
    """Counts what is put on both streams."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._seen: dict[str, int] = {}

    async def news(self) -> dict[str, int]:
        """Bytes of all messages since the last call."""
        found = {}
        for name, stream in STREAMS.items():
            last, nbytes = self._seen.get(name, 0), 0
            if (await self._bus.stream_info(stream)).last_seq > last:
                async for message in self._bus.follow(stream, from_seq=last + 1, live=False):
                    nbytes, last = nbytes + len(message.data), message.seq
            self._seen[name], found[name] = last, nbytes
        return found

    async def stored(self) -> dict[str, int]:
        """Bytes that each stream takes."""
        return {name: (await self._bus.stream_info(stream)).nbytes for name, stream in STREAMS.items()}


async def session(cell: RunningCell, texts: Texts, turns: int, turn_tokens: int) -> dict[str, Any]:
    """Figures of one session on a cell with a standby; all turns send everything again."""
    bus = await connect((cell.nats_url,), "bench")
    asker = Asker(cell.base_url, model_name(cell.base_url), explains=True)
    try:
        return await _session(cell, bus, asker, texts, turns, turn_tokens)
    finally:
        asker.close()
        await bus.close()


async def _session(
    cell: RunningCell, bus: Bus, asker: Asker, texts: Texts, turns: int, turn_tokens: int
) -> dict[str, Any]:
    await rest(bus)
    await asker.ask([{"role": "user", "content": texts.text(64)}])
    await rest(bus)
    streams, messages, had, taken = Streams(bus), [], 0, []
    await streams.news()
    before_s = {name: used_s([pid]) for name, pid in cell.pids().items()}
    for number in range(turns):
        messages.append({"role": "user", "content": texts.text(turn_tokens - ANSWER_TOKENS)})
        sample = await asker.ask(messages, max_tokens=ANSWER_TOKENS)
        messages.append({"role": "assistant", "content": sample.text})
        await rest(bus)
        tokens = sample.prompt_tokens + sample.output_tokens
        taken.append(Turn(sample, tokens - had, await streams.news()))
        had = tokens
        print(f"turn {number}: {tokens} tokens, outside {sample.outside_ms:.1f} ms, {taken[-1].nbytes}", flush=True)
    processor_s = {name: round(used_s([pid]) - before_s[name], 2) for name, pid in cell.pids().items()}
    active = (await CacheCalls(bus).status()).scheduler_id
    return {
        "turns": turns,
        "tokens": had,
        "all_turns": of_samples([turn.sample for turn in taken]),
        "last_turns": of_samples([turn.sample for turn in taken[-LAST_TURNS:]]),
        "outside_ms": round(sum(turn.sample.outside_ms for turn in taken), 1),
        "new_tokens_a_turn": statistics.median(turn.new_tokens for turn in taken),
        "bytes_a_turn": {name: spread(turn.nbytes[name] for turn in taken) for name in STREAMS},
        "bytes_of_the_last_turn": taken[-1].nbytes,
        "allowed_over_bytes": round(min(turn.of_allowed for turn in taken), 3),
        "stored_bytes": await streams.stored(),
        "processor_s": processor_s,
        "standby_s": sum(used for name, used in processor_s.items() if "scheduler" in name and name != active),
        "scheduler_s": processor_s[active],
    }
