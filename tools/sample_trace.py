"""The trace that ``thermocline simulate`` takes where none is named: ``python -m tools.sample_trace``.

Generated, not recorded: agents with tools, tenants with documents of their own, and a job that reads through many
documents, all from one seed. An answer takes its tokens' time at a fixed speed; what goes on from it comes after that.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

import msgspec

from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads import Asked, Workload
from thermocline.simulate.workloads.agents import AgentOptions, AgentWorkload
from thermocline.simulate.workloads.scans import ScanOptions, ScanWorkload
from thermocline.simulate.workloads.tenants import TenantOptions, TenantWorkload
from thermocline.trace.format import BLOCK_TOKENS, SAMPLE, TraceRequest

SEED = 20
REQUESTS = 1000
ANSWER_TOKENS_PER_S = 40.0

Key = tuple[int, tuple[tuple[int, int, int, int], ...]]
"""The block before, and what the block holds: a workload, a span of it, where it begins there, and tokens."""


def workloads() -> list[Workload]:
    """Make the three workloads, whose requests come in one stream."""
    agents = AgentOptions(
        sessions=60, arrivals_s=0.05, kinds=5, exponent=0.8, instruction_tokens=3000, steps=8, result_tokens=700,
        answer_tokens=120, tool_s=12,
    )  # fmt: skip
    tenants = TenantOptions(
        queries=450, arrivals_s=0.4, tenants=8, tenant_exponent=0.8, burst=6, system_tokens=1100, documents=25,
        document_exponent=0.9, document_tokens=3600, question_tokens=120, answer_tokens=180,
    )  # fmt: skip
    scans = ScanOptions(
        queries=200, arrivals_s=0.2, prompts=6, prompt_tokens=2600, exponent=0.7, scan_length=40, pause_length=25,
        document_tokens=5200, question_tokens=100, answer_tokens=90,
    )  # fmt: skip
    return [AgentWorkload(agents, SEED), TenantWorkload(tenants, SEED + 1), ScanWorkload(scans, SEED + 2)]


def asked(sources: Sequence[Workload]) -> Iterator[tuple[float, int, Asked]]:
    """Yield (seconds, number of the workload, request) in order of time, follow-ups among them."""
    order = count()
    due: list[tuple[float, int, int, Asked]] = []
    streams = [source.requests() for source in sources]

    def push(time_s: float, workload: int, request: Asked) -> None:
        heappush(due, (time_s, next(order), workload, request))

    for workload, stream in enumerate(streams):
        for request in stream:
            assert request.time_s is not None
            push(request.time_s, workload, request)
    while due:
        time_s, _, workload, request = heappop(due)
        yield time_s, workload, request
        following = sources[workload].follow_up(request)
        if following is not None:
            pause_s, then = following
            push(time_s + request.answer.tokens / ANSWER_TOKENS_PER_S + pause_s, workload, then)


class Blocks:
    """Numbers of blocks, in order of first use. Equal fronts have equal numbers."""

    def __init__(self) -> None:
        self._known: dict[Key, int] = {}

    def of(self, workload: int, spans: Sequence[Span]) -> list[int]:
        """Return the numbers of a prompt's blocks of 512 tokens, the last of which may be shorter."""
        numbers: list[int] = []
        held: list[tuple[int, int, int, int]] = []
        room = BLOCK_TOKENS
        for span in spans:
            begin = 0
            while begin < span.tokens:
                taken = min(room, span.tokens - begin)
                held.append((workload, span.name, begin, taken))
                begin, room = begin + taken, room - taken
                if not room:
                    self._append(numbers, held)
                    held, room = [], BLOCK_TOKENS
        if held:
            self._append(numbers, held)
        return numbers

    def _append(self, numbers: list[int], held: Sequence[tuple[int, int, int, int]]) -> None:
        key = (numbers[-1] if numbers else -1, tuple(held))
        numbers.append(self._known.setdefault(key, len(self._known)))


def lines() -> Iterator[bytes]:
    """Yield the trace's lines."""
    blocks = Blocks()
    for (time_s, workload, request), _ in zip(asked(workloads()), range(REQUESTS), strict=False):
        made = TraceRequest(
            timestamp=round(time_s * 1e3),
            input_length=request.prompt_tokens,
            output_length=request.answer.tokens,
            hash_ids=blocks.of(workload, request.spans),
        )
        yield msgspec.json.encode(made) + b"\n"


def main() -> int:
    """Write the sample where commands look for it."""
    # There are no flags, but --help must not write.
    argparse.ArgumentParser(description=__doc__).parse_args()
    SAMPLE.write_bytes(b"".join(lines()))
    print(f"wrote {SAMPLE.relative_to(Path(__file__).parents[1])}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
