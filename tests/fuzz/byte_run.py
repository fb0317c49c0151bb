"""Feed numbered inputs to their targets in a process of their own, which may crash, hang or be out of memory."""

from __future__ import annotations

import mmap
import multiprocessing
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import msgspec

from tests.fuzz.byte_inputs import Inputs
from tests.fuzz.targets import FoundInput, Target, failure_of

ROOM_BYTES = 256 * 2**20
"""What the process may take on top of what it has: a length that a few bytes claim must not be believed."""

SLOWEST_S = 1.0
"""Processor time for one input, which has 64 KiB at the most."""

STUCK_S = 30.0
"""Without an end of an input for so long, the process is taken for hung."""


class ByteFigures(msgspec.Struct, kw_only=True):
    """What came of a range of numbers. ``by_target`` counts inputs."""

    inputs: int = 0
    seconds: float = 0.0
    by_target: dict[str, int] = msgspec.field(default_factory=dict)
    found: list[FoundInput] = msgspec.field(default_factory=list)
    slowest_ms: float = 0.0
    slowest: str = ""

    def per_second(self) -> float:
        return self.inputs / self.seconds if self.seconds else 0.0

    def add(self, other: ByteFigures) -> None:
        """Count what another process did."""
        self.inputs += other.inputs
        self.found += other.found
        for name, count in other.by_target.items():
            self.by_target[name] = self.by_target.get(name, 0) + count
        if other.slowest_ms > self.slowest_ms:
            self.slowest_ms, self.slowest = other.slowest_ms, other.slowest


class Feed(Protocol):
    """``inputs.at`` of one number: the target and the bytes."""

    def at(self, number: int) -> tuple[Target, bytes]: ...


def run_block(seed: int, numbers: range, targets: Sequence[Target], figures: ByteFigures) -> None:
    """Feed all of ``numbers`` and add what came of them to ``figures``."""
    begun_s = time.monotonic()
    figures.add(_fed(Inputs(seed, targets), numbers, seed))
    figures.seconds += time.monotonic() - begun_s


def outcome_apart(target: Target, inputs: Sequence[bytes]) -> list[str]:
    """What each input does to ``target`` in a process of its own, "" where it is right."""
    figures = _fed(_Given(target, inputs), range(len(inputs)), 0)
    failures = {found.case: found.failure for found in figures.found}
    return [failures.get(f"0/{number}", "") for number in range(len(inputs))]


@dataclass(frozen=True)
class _Given:
    """Inputs that were found before."""

    target: Target
    inputs: Sequence[bytes]

    def at(self, number: int) -> tuple[Target, bytes]:
        return self.target, self.inputs[number]


def _fed(inputs: Feed, numbers: range, seed: int) -> ByteFigures:
    """Feed all of ``numbers``; one that ends its process is noted as found, and the next process goes on behind it."""
    whole = ByteFigures()
    at = mmap.mmap(-1, 8)
    while numbers:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        at[:8] = numbers.start.to_bytes(8, "little")
        process = multiprocessing.get_context("fork").Process(
            target=_feed, args=(inputs, numbers, seed, at, sender), daemon=True
        )
        process.start()
        sender.close()
        is_hung = not _wait(receiver, at)
        block: ByteFigures | None = None
        if is_hung:
            process.kill()
        else:
            try:
                block = receiver.recv()
            except EOFError:
                pass  # It ended without a word.
        process.join()
        receiver.close()
        if block is not None:
            whole.add(block)
            break
        fatal = int.from_bytes(at[:8], "little")
        target, data = inputs.at(fatal)
        how = "hangs" if is_hung else f"ends the process (exit code {process.exitcode})"
        found = FoundInput(target=target.name, failure=how, data=data, case=f"{seed}/{fatal}")
        whole.add(ByteFigures(inputs=1, by_target={target.name: 1}, found=[found]))
        # What this process had found before is lost with it, and found again.
        whole.add(_fed(inputs, range(numbers.start, fatal), seed))
        numbers = range(fatal + 1, numbers.stop)
    return whole


def _wait(receiver: Connection, at: mmap.mmap) -> bool:
    """Whether the process said something, or ended, before it stood still for too long."""
    while True:
        before = at[:8]
        if receiver.poll(STUCK_S):
            return True
        if at[:8] == before:
            return False


def _feed(inputs: Feed, numbers: range, seed: int, at: mmap.mmap, sender: Connection) -> None:
    """The body of the process."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + ROOM_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    block = ByteFigures()
    for number in numbers:
        at[:8] = number.to_bytes(8, "little")
        target, data = inputs.at(number)
        begun_s = time.process_time()
        failure = failure_of(target, data)
        spent_s = time.process_time() - begun_s
        if not failure and spent_s > SLOWEST_S:
            failure = f"takes longer than {SLOWEST_S:g} s"
        if failure:
            block.found.append(FoundInput(target=target.name, failure=failure, data=data, case=f"{seed}/{number}"))
        block.inputs += 1
        block.by_target[target.name] = block.by_target.get(target.name, 0) + 1
        if spent_s * 1e3 > block.slowest_ms:
            block.slowest_ms, block.slowest = spent_s * 1e3, f"{target.name} ({seed}/{number})"
    sender.send(block)
    sender.close()
