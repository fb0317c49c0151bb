"""Many cases against one gateway: what was wrong, how fast it went, and whether anything grew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from tests.fuzz.api_cases import Case, Cases
from tests.fuzz.api_checks import fault_of
from tests.fuzz.api_exchange import exchange
from tests.fuzz.api_server import resident_bytes
from tests.fuzz.heard import Heard

AT_ONCE = 16
BLOCK = 1000
"""Cases after which the gateway has to come to rest."""


class Server(Protocol):
    """A gateway that listens, and what is heard of it."""

    heard: Heard
    host: str
    port: int
    hints: dict[str, list[Any]]

    async def document(self) -> dict[str, Any]:
        """The OpenAPI document."""

    async def at_rest(self) -> str:
        """Wait until nothing is in progress; what is left after all patience, or ""."""


class FoundCase(msgspec.Struct, frozen=True, kw_only=True):
    """``sent`` is None for what a whole block of cases did, such as a leak."""

    case: str
    kind: str
    failure: str
    sent: Case | None = None


class ApiFigures(msgspec.Struct, kw_only=True):
    """What came of a run; ``resident_mib`` is taken at rest after each block."""

    cases: int = 0
    by_kind: dict[str, int] = {}
    statuses: dict[str, int] = {}
    seconds: float = 0.0
    tasks: list[int] = []
    resident_mib: list[float] = []
    found: list[FoundCase] = []

    def per_second(self) -> float:
        return self.cases / self.seconds if self.seconds else 0.0

    def begin_process(self) -> None:
        """Forget the memory of a process that was interrupted: another one has another size."""
        self.tasks.clear()
        self.resident_mib.clear()

    def growth_bytes_per_case(self) -> float:
        """The slope of memory over the second half: caches that have a bound are full by then."""
        half = self.resident_mib[len(self.resident_mib) // 2 :]
        if len(half) < 2:
            return 0.0
        middle = (len(half) - 1) / 2
        spread = sum((at - middle) ** 2 for at in range(len(half)))
        slope = sum((at - middle) * mib for at, mib in enumerate(half)) / spread
        return slope * 2**20 / BLOCK


async def run_cases(
    server: Server, seed: int, numbers: range, figures: ApiFigures, said: Callable[[str], None] = lambda line: None
) -> None:
    """Run ``numbers`` and add what came of them to ``figures``, a block at a time."""
    cases = Cases(seed, await server.document(), server.hints)
    for first in range(numbers.start, numbers.stop, BLOCK):
        block = range(first, min(first + BLOCK, numbers.stop))
        begun_s = time.monotonic()
        await _block(server, cases, seed, block, figures)
        left = await server.at_rest()
        figures.seconds += time.monotonic() - begun_s
        failures = [left] if left else []
        failures += sorted(set(server.heard.errors))
        server.heard.errors.clear()
        place = f"{seed}/{block.start}-{block.stop - 1}"
        figures.found += [FoundCase(case=place, kind="block", failure=failure) for failure in failures]
        figures.tasks.append(len(asyncio.all_tasks()))
        figures.resident_mib.append(round(resident_bytes() / 2**20, 1))
        said(f"{figures.cases} cases, {figures.per_second():.0f}/s, {figures.resident_mib[-1]} MiB")


async def _block(server: Server, cases: Cases, seed: int, numbers: range, figures: ApiFigures) -> None:
    waiting = iter(numbers)

    async def work() -> None:
        for number in waiting:
            case = cases.at(number)
            failure = await try_case(server, case, figures.statuses)
            figures.cases += 1
            figures.by_kind[case.kind] = figures.by_kind.get(case.kind, 0) + 1
            if failure:
                figures.found.append(FoundCase(case=f"{seed}/{number}", kind=case.kind, failure=failure, sent=case))

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


async def try_case(server: Server, case: Case, statuses: dict[str, int]) -> str:
    """Send one case; what is wrong with what came of it, or ""."""
    outcome = await exchange(server.host, server.port, case)
    for response in outcome.responses:
        statuses[str(response.status)] = statuses.get(str(response.status), 0) + 1
    faults = [outcome.fault, *(fault_of(response, is_head=case.is_head) for response in outcome.responses)]
    return next((fault for fault in faults if fault), "")
