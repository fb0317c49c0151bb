"""Fills disks, restarts, damages, removes and adds them back under load: ``python -m tests.disk_soak --rounds 300``.

Sessions come back, read what is there of their chunks, compute the rest and save it, more of them than the disk holds.
Meanwhile directories die and come back, files are damaged, torn, deleted or cannot be read, and the storage ends and
starts again. At the end what is on the disk is counted: a chunk is **usable** if everything that it continues is there.
Everything follows from the seed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.chunk_makers import MadeChunk, make_chain
from tests.disk_node import NBYTES, Faults, Node, running

DIRECTORIES = 3
SESSIONS = 48
CHUNKS = 12  # Of a session.
QUOTA = SESSIONS * CHUNKS * NBYTES // 3
TURNS = 12  # Of sessions, in a round.
LEAST_USABLE = 0.95


@dataclass
class Outcome:
    """Of a soak, at its end."""

    chunks: int = 0
    usable: int = 0
    old: int = 0
    """Of ``chunks``, those that were saved before the last start."""
    old_usable: int = 0
    used: int = 0
    events: dict[str, int] = field(default_factory=dict)

    def count(self, event: str) -> None:
        self.events[event] = self.events.get(event, 0) + 1


class Soak:
    """One storage on three directories."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.outcome = Outcome()
        self._chance = random.Random(seed)
        self._paths = [str(folder / f"disk-{number}") for number in range(DIRECTORIES)]
        for path in self._paths:
            Path(path).mkdir()
        self._sessions = [make_chain(CHUNKS, seed=seed * 1000 + number) for number in range(SESSIONS)]
        self._calls = Faults()
        self._dead: dict[str, int] = {}  # Directories, and in how many rounds they are back.
        self._unreadable: dict[str, None] = {}  # Names of files.
        self._saved: dict[bytes, int] = {}  # The start in which a chunk was saved last.
        self._start = 0

    async def run(self, rounds: int) -> Outcome:
        """``rounds`` of load and faults, then some load without faults, and the count."""
        left = rounds
        while left > 0:
            some = min(left, self._chance.randint(3, 8))
            await self._life(some, is_killed=self._chance.random() < 0.5, has_faults=True)
            left -= some
            self.outcome.count("restarts")
        await self._life(8, is_killed=False, has_faults=False)
        return self.outcome

    async def _life(self, rounds: int, *, is_killed: bool, has_faults: bool) -> None:
        self._start += 1
        self._calls.is_bad = self._is_bad
        if not has_faults:
            self._dead.clear()
        async with running(self._paths, QUOTA, self._calls, is_killed=is_killed) as node:
            for _ in range(rounds):
                self._count_down()
                await node.watch.look()
                if has_faults:
                    self._break()
                for _ in range(TURNS):
                    await self._turn(node)
                # Files that a dead directory does not delete may come on top, until somebody writes.
                assert node.tier.index.nbytes <= QUOTA
            if not has_faults:
                await node.watch.look()
                assert not list(node.watch.faults())
                assert node.tier.index.used <= QUOTA
                self._compare(node)

    async def _turn(self, node: Node) -> None:
        """A session comes back: hot ones more often, and as deep as they like."""
        number = min(int(self._chance.expovariate(1 / 12)), SESSIONS - 1)
        session = self._sessions[number][: self._chance.randint(4, CHUNKS)]
        node.tier.index.touch([chunk.key for chunk in session], 0, None, node.tier.now_s())
        there = 0
        for chunk in session:
            if not await node.can_read(chunk):
                break
            there += 1
        await self._save(node, session, there)

    async def _save(self, node: Node, session: list[MadeChunk], first: int) -> None:
        outcomes = await node.save(session, first=first)
        for chunk, outcome in zip(session[first:], outcomes, strict=True):
            self.outcome.count(outcome)
            if outcome == "stored":
                self._saved[chunk.key.identity] = self._start

    def _break(self) -> None:
        kind = self._chance.choice(["nothing", "dead", "damaged", "torn", "deleted", "unreadable"])
        if kind == "dead" and len(self._dead) < DIRECTORIES - 1:
            self._dead[self._chance.choice(self._paths)] = self._chance.randint(1, 4)
        # Directories go with their last chunk meanwhile, which only this way of listing passes over.
        found = (each for path in self._paths for each in os.walk(os.path.join(path, "chunks")))
        files = sorted(Path(folder, name) for folder, _, names in found for name in names if name.endswith(".chunk"))
        if kind in ("damaged", "torn", "deleted", "unreadable") and files:
            self._spoil(self._chance.choice(files), kind)
        self.outcome.count(kind)

    def _spoil(self, file: Path, kind: str) -> None:
        if kind == "damaged":
            data = bytearray(file.read_bytes())
            data[self._chance.randrange(len(data))] ^= 1
            file.write_bytes(data)
        elif kind == "torn":
            file.write_bytes(file.read_bytes()[: NBYTES // 2])
        elif kind == "deleted":
            file.unlink()
        else:
            self._unreadable[file.name] = None

    def _count_down(self) -> None:
        self._dead = {path: left - 1 for path, left in self._dead.items() if left > 1}

    def _is_bad(self, what: str) -> bool:
        verb, _, path = what.rpartition(" ")
        if any(path.startswith(dead) for dead in self._dead):
            return True
        return verb == "reading" and "/chunks/" in path and Path(path).name in self._unreadable

    def _compare(self, node: Node) -> None:
        outcome = self.outcome
        for session in self._sessions:
            is_usable = True
            for chunk in session:
                is_there = chunk.key in node.tier
                is_usable = is_usable and is_there
                is_old = is_there and self._saved[chunk.key.identity] < self._start
                outcome.chunks += is_there
                outcome.usable += is_usable
                outcome.old += is_old
                outcome.old_usable += is_old and is_usable
        outcome.used = node.tier.index.used


def main() -> int:
    """Run a soak, and say what is left. 1 if too little of it can be used."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=300, help="rounds of load, a fault in most of them")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = asyncio.run(Soak(Path(folder), options.seed).run(options.rounds))
    share = outcome.old_usable / max(1, outcome.old)
    print(f"old chunks {outcome.old}, of which can be used {outcome.old_usable} ({share:.1%})")
    print(f"all chunks {outcome.chunks}, of which can be used {outcome.usable}; {outcome.used} of {QUOTA} bytes")
    print(", ".join(f"{event} {count}" for event, count in sorted(outcome.events.items())))
    return int(share < LEAST_USABLE)


if __name__ == "__main__":
    sys.exit(main())
