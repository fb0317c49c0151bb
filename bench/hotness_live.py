"""HotPrefix's switches in running cells: selective admission, promotion and loads on demand, with the bundled model.

    python -m bench.hotness_live [--rounds 8] [--requests 24] [--workloads mmlu,retrieval] [--held-out] [--save]

Cells are started side by side, one for each arrangement, on two tiers that together hold less than is asked about, and
idle but for the one whose turn it is. In every round each of them answers the same requests, the order of the cells
drawn anew, and the next begins when the last has written what it had to. Requests are those of the simulator's
generators (``thermocline/simulate/workloads``), their tokens brought into the model's vocabulary; a request that the
model's context cannot hold is left out. The pools are emptied before each workload; what the cells learned stays.

Hits by tier, tokens that were computed and tokens that moved are counts: what else the machine does changes them
little. TTFT and processor time are compared in the same round, with ``all`` in the same round; the median of the
ratios counts, and its 95% interval is drawn from the rounds by resampling. The first round fills the pools and does
not count.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import msgspec

from bench import results_file
from bench.caching_cost import ADMIN_KEY, cell_status, cpu_by_process, ratio, settled
from bench.held_out import HELD_OUT_FAMILIES, HeldOutError, is_held_out
from bench.hotness_switches import SWITCHES
from bench.simulator_validation import token_ids
from thermocline.client import Answer, served_model, stream_answer
from thermocline.simulate.profiles import load_model
from thermocline.simulate.workloads import WORKLOADS, Asked, Workload, make_workload
from thermocline.simulate.workloads.agents import AgentOptions
from thermocline.simulate.workloads.documents import DocumentOptions
from thermocline.simulate.workloads.few_shot import FewShotOptions
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import BUNDLED_MODEL, SupervisorConfig, bundled_model

ARRANGEMENTS: dict[str, dict[str, Any]] = {
    name.replace(", ", "+"): SWITCHES[name]
    for name in ("all", "admission", "promotion", "both", "no loads", "promotion, no loads")
}
DEVELOPED_WITH = ("mmlu", "chat", "agents", "retrieval", "scans", "shot-tree")
MOST_TOKENS = 4_000
"""Prompt and answer; the bundled model's context is 4,096."""

AT_ONCE = 2
SESSIONS = 8
"""Conversations that take turns."""

COUNTED = {
    "hit_device": "hit_tokens_device",
    "hit_host": "hit_tokens_host",
    "computed": "prefill_tokens_planned",
}
MOVED = {"backed_up": "host_admitted_pages", "promoted": "promoted_pages"}
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """One cell's part of a round: mean TTFT in seconds, processor time, and what its counters went up by, in tokens."""

    ttft_s: float
    cpu_s: float
    prompt_tokens: int
    counted: dict[str, int]


def options_of(name: str) -> tuple[str, msgspec.Struct]:
    """Family and options of a workload by name, so small that the model's context holds most of it."""
    own: dict[str, tuple[str, msgspec.Struct]] = {
        "mmlu": ("few-shot", FewShotOptions(dataset="mmlu")),
        "documents": ("documents", DocumentOptions(contexts=16, queries=2000, prompt_tokens=2000)),
        "agents": ("agents", AgentOptions(max_tokens=MOST_TOKENS)),
    }
    return own.get(name) or (name, WORKLOADS[name][0]())


def in_order(workload: Workload) -> Iterator[Asked]:
    """A workload's requests in the order of its own times; where it has none, a few sessions take turns."""
    first = iter(workload.requests())
    waiting: list[tuple[float, int, Asked]] = []
    number = 0
    is_over = False
    while waiting or not is_over:
        while not is_over and len(waiting) < SESSIONS:
            asked = next(first, None)
            if asked is None:
                is_over = True
                break
            number += 1
            now = waiting[0][0] if waiting else 0.0
            heappush(waiting, (now if asked.time_s is None else asked.time_s, number, asked))
        if not waiting:
            return
        time_s, _, asked = heappop(waiting)
        yield asked
        following = workload.follow_up(asked)
        if following is not None:
            number += 1
            heappush(waiting, (time_s + following[0], number, following[1]))


def requests_of(name: str, seed: int, count: int) -> list[Asked]:
    """So many requests that the model's context holds."""
    family, options = options_of(name)
    fitting = (
        asked
        for asked in in_order(make_workload(family, options, seed))
        if asked.prompt_tokens + asked.answer.tokens <= MOST_TOKENS
    )
    return list(islice(fitting, count))


def start_cells(
    stack: ExitStack, folder: Path, device_tokens: int, host_share: float, names: list[str]
) -> dict[str, RunningCell]:
    """A cell for each arrangement that is named, ready."""
    token_bytes = load_model(BUNDLED_MODEL).kv_token_bytes
    cells = {}
    for number, name in enumerate(names):
        file = folder / f"{number}.toml"
        lines = [f'[gateway]\nadmin_key = "{ADMIN_KEY}"\n[scheduler]\n']
        lines += [
            f"{key} = {value if isinstance(value, int) else chr(34) + value + chr(34)}\n"
            for key, value in ARRANGEMENTS[name].items()
        ]
        file.write_text("".join(lines), encoding="utf-8")
        config = SupervisorConfig(
            model=str(bundled_model()),
            dtype="float32",
            port=0,
            threads=1,
            page_size=PAGE_SIZE,
            device_kv_bytes=device_tokens * token_bytes,
            # Identities and checksums take a little more than the pages.
            host_kv_bytes=int(host_share * device_tokens * token_bytes * 1.02),
        )
        cells[name] = stack.enter_context(running(config, config_file=file))
    return cells


async def one_turn(cell: RunningCell, requests: list[Asked]) -> Turn:
    """Answer these requests in their order, a few at once, and wait until what follows from them is done."""
    answers: list[Answer] = []
    async with httpx.AsyncClient(base_url=cell.base_url, timeout=600, trust_env=False) as client:
        served = await served_model(client)
        before, begun_cpu = (await cell_status(client))["counters"], cpu_by_process(cell)
        left = iter(requests)

        async def one_client() -> None:
            for asked in left:
                body = {"model": served["id"], "prompt": token_ids(asked, served["vocab_size"]), "temperature": 0}
                body |= {"max_tokens": asked.answer.tokens, "ignore_eos": True, "return_token_ids": True}
                answers.append(await stream_answer(client, "/v1/completions", body))

        await asyncio.gather(*(one_client() for _ in range(AT_ONCE)))
        await settled(client)
        after = (await cell_status(client))["counters"]

    def risen(counter: str) -> int:
        return int(after.get(counter, 0) - before.get(counter, 0))

    counted = {name: risen(counter) for name, counter in COUNTED.items()}
    counted |= {name: PAGE_SIZE * risen(counter) for name, counter in MOVED.items()}
    return Turn(
        statistics.fmean(answer.ttft_s for answer in answers),
        sum(cpu_by_process(cell).values()) - sum(begun_cpu.values()),
        sum(answer.prompt_tokens for answer in answers),
        counted,
    )


async def empty(cell: RunningCell) -> None:
    """Drop what both pools hold."""
    async with httpx.AsyncClient(base_url=cell.base_url, timeout=60, trust_env=False) as client:
        answer = await client.post("/v1/cache/flush", json={}, headers={"x-admin-key": ADMIN_KEY})
        answer.raise_for_status()


async def measure(cells: dict[str, RunningCell], requests: list[Asked], rounds: int, seed: int) -> dict[str, Any]:
    """Figures by arrangement: counts of all rounds together, and ratios to ``all`` in the same round."""
    rng = random.Random(seed)
    size = len(requests) // (rounds + 1)
    turns: dict[str, list[Turn]] = {name: [] for name in cells}
    for cell in cells.values():
        await empty(cell)
    for number in range(rounds + 1):
        asked = requests[number * size : (number + 1) * size]
        for name in rng.sample(list(cells), len(cells)):
            turn = await one_turn(cells[name], asked)
            if number:
                turns[name].append(turn)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return {name: figures(own, turns["all"]) for name, own in turns.items()}


def figures(own: list[Turn], everything: list[Turn]) -> dict[str, Any]:
    """Of one arrangement. Hits are of prompt tokens; moved tokens are of all counted rounds."""
    prompts = sum(turn.prompt_tokens for turn in own)
    counted = {name: sum(turn.counted[name] for turn in own) for name in own[0].counted}
    return {
        "hit_ratio": (counted["hit_device"] + counted["hit_host"]) / prompts,
        "device_hit_ratio": counted["hit_device"] / prompts,
        "computed_tokens": counted["computed"],
        "backed_up_tokens": counted["backed_up"],
        "loaded_tokens": counted["hit_host"],
        "promoted_tokens": counted["promoted"],
        "ttft_mean_ms": 1e3 * statistics.fmean(turn.ttft_s for turn in own),
        "ttft_ratio": ratio([one.ttft_s / other.ttft_s for one, other in zip(own, everything, strict=True)]),
        "cpu_ratio": ratio([one.cpu_s / other.cpu_s for one, other in zip(own, everything, strict=True)]),
    }


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    known = results_file.arguments(__doc__, "--seed", "--save")
    known.add_argument("--rounds", type=int, default=8)
    known.add_argument("--requests", type=int, default=24, help="of each round")
    known.add_argument("--workloads", default=",".join(DEVELOPED_WITH))
    known.add_argument("--arrangements", default=",".join(ARRANGEMENTS), help="all is among them")
    known.add_argument("--device-tokens", type=int, default=12_288)
    known.add_argument("--host-share", type=float, default=1.0, help="host memory over the device's")
    known.add_argument("--held-out", action="store_true", help="for the report: families that are held out, too")
    options = known.parse_args()
    if is_held_out("few-shot", options.seed):
        raise HeldOutError(f"seed {options.seed} is held out")
    names = [*options.workloads.split(","), *(HELD_OUT_FAMILIES if options.held_out else ())]
    arrangements = options.arrangements.split(",")
    results: dict[str, Any] = {
        "model": BUNDLED_MODEL,
        "device_tokens": options.device_tokens,
        "host_share": options.host_share,
        "rounds": options.rounds,
        "requests_a_round": options.requests,
        "held_out": list(HELD_OUT_FAMILIES),
        "rows": {},
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cells = start_cells(stack, Path(folder), options.device_tokens, options.host_share, arrangements)
        for workload in names:
            requests = requests_of(workload, options.seed, options.requests * (options.rounds + 1))
            results["rows"][workload] = asyncio.run(measure(cells, requests, options.rounds, options.seed))
            show(workload, results["rows"][workload])
            if options.save:  # Each workload is kept as soon as it is over.
                print("->", results_file.write("hotness_live", results, seed=options.seed), flush=True)


def show(workload: str, row: dict[str, Any]) -> None:
    """One line an arrangement."""
    for name, one in row.items():
        ttft = one["ttft_ratio"]
        print(
            f"{workload:10} {name:15} hits {one['hit_ratio']:.3f} (device {one['device_hit_ratio']:.3f})"
            f"  computed {one['computed_tokens']:7}  down {one['backed_up_tokens']:7}"
            f"  up {one['loaded_tokens']:7} + {one['promoted_tokens']:7}"
            f"  TTFT {ttft['median']:.2f} ({ttft['from']:.2f} to {ttft['to']:.2f})"
            f"  CPU {one['cpu_ratio']['median']:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
