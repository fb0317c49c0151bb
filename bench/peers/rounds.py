"""Brings systems up, and asks one after the other, in an order that turns from round to round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.asking import Spoken, ask
from bench.peers.figures import Figures, Processor, figures_of
from bench.peers.passes import PASSES, Pass, warm_up_passes
from bench.peers.processor_time import drop_from_page_cache, settle, used_s
from bench.peers.systems import SYSTEMS, Bounds, Server, Starts

_ROUNDS = 1024  # Of a run, of each workload, none of which shares a prompt with another.
_WARM_UP = "warm-up"

Answers = dict[int, list[int]]
"""Token ids by the number of the request; empty where a server does not say them."""


@dataclass(slots=True)
class Measured:
    """Of one workload: by system and pass, the figures of each round, and the answers of the first one."""

    figures: dict[str, dict[str, list[Figures]]] = field(default_factory=dict)
    answers: dict[str, dict[str, Answers]] = field(default_factory=dict)


def turned(names: Sequence[str], number: int) -> list[str]:
    """Another goes first in each round."""
    start = number % len(names)
    return [*names[start:], *names[:start]]


def seed_of(workload: str, seed: int, number: int) -> int:
    """Of one round of a workload. What is kept on a disk outlives a round, so no other may ask for the same."""
    kinds = (_WARM_UP, *PASSES)
    return (seed * _ROUNDS + number) * len(kinds) + kinds.index(workload)


class Contest:
    """Systems that are up at the same time, of which one at a time is asked."""

    def __init__(self, bounds: Bounds, *, seed: int, share: float, say: Callable[[str], None]) -> None:
        self._bounds = bounds
        self._seed = seed
        self._share = share
        self._say = say
        self._servers: dict[str, Server] = {}

    def run(
        self,
        workloads: Sequence[str],
        systems: Mapping[str, Starts],
        rounds: int,
        folder: Path,
        on_round: Callable[[str, Measured], None],
    ) -> None:
        """``on_round`` gets what a workload has given so far, after each round. Raises PeerFailed."""
        with ExitStack() as stack:
            for name, start in systems.items():
                began_s = time.monotonic()
                home = folder / name
                home.mkdir(parents=True)
                self._servers[name] = stack.enter_context(start(name, self._bounds, home))
                for made in warm_up_passes(self._seed, self._share):
                    self._ask(name, made, seed_of(_WARM_UP, self._seed, 0))
                self._say(f"{name} is up and warm after {time.monotonic() - began_s:.0f} s")
            for workload in workloads:
                measured = Measured()
                for number in range(rounds):
                    for name in turned(list(systems), number):
                        self._round(workload, name, number, measured)
                    on_round(workload, measured)

    def _round(self, workload: str, name: str, number: int, measured: Measured) -> None:
        tiers = SYSTEMS[name].tiers
        seed = seed_of(workload, self._seed, number)
        self._settled(name).empty([tier for tier in ("device", "host") if tier in tiers])
        for made in PASSES[workload](seed, self._share):
            if made.needs is not None and made.needs not in tiers:
                continue
            server = self._settled(name)
            if made.emptied:
                server.empty(made.emptied)
                if server.disk_folder is not None:
                    drop_from_page_cache(server.disk_folder)
                self._settled(name)
            figures, answers = self._ask(name, made, seed)
            measured.figures.setdefault(name, {}).setdefault(made.name, []).append(figures)
            measured.answers.setdefault(name, {}).setdefault(made.name, answers)
            self._say(
                f"{workload} round {number + 1} {name:14} {made.name:12} {figures['seconds']:6.1f} s "
                f"{figures['requests_per_s']:6.2f} requests/s  TTFT mean {figures['ttft_mean_ms']:7.0f} "
                f"p50 {figures['ttft_p50_ms']:7.0f} ms  a token {figures.get('token_p50_ms', 0.0):5.1f} ms  "
                f"cached {figures.get('cached_part', 0.0):4.0%}  "
                f"processor {figures['processor_own_s']:5.1f} s, of others {figures['processor_others_s']:.1f} s"
            )

    def _settled(self, name: str) -> Server:
        """The server, once it and all others do nothing any more."""
        settle([pid for server in self._servers.values() for pid in server.pids()])
        return self._servers[name]

    def _ask(self, name: str, made: Pass, seed: int) -> tuple[Figures, Answers]:
        server = self._servers[name]
        spoken = Spoken(server.base_url, server.model_name(), server.keeps_connections)
        others = [pid for other, each in self._servers.items() if other != name for pid in each.pids()]
        own_s, others_s, client_s = used_s(server.pids()), used_s(others), time.process_time()
        outcome = ask(spoken, self._bounds, made, seed)
        client_s = time.process_time() - client_s
        processor = Processor(used_s(server.pids()) - own_s, used_s(others) - others_s, client_s)
        answers = {reply.number: reply.said.token_ids for reply in outcome.replies}
        return figures_of(made, outcome, processor), answers
