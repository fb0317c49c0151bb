"""Whether one tenant can tell from the time to first token what another has cached.

    python -m bench.tenant_timing [--rounds 150] [--tokens 384] [--seed 1] [--save]

A real cell with two tenants. In each round the first tenant asks a fresh prompt, which the cell then has cached. The
second asks the same prompt ("other's"), another that nobody asked ("fresh"), both in random order, and then the first
of them again ("own", which is cached for it by now). Two-sided rank tests (Mann and Whitney, 1947) compare other's and
own with fresh. They must find nothing in the one case and everything in the other, which says that the test would see
what there is to see. How small a leak it would see is estimated too: fresh samples, drawn anew and made faster by a
share of what a cached prefix saves, are tested against fresh ones many times.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench import results_file
from bench.emptying import rest
from services.gateway.keys import key_hash, new_key, new_salt
from services.gateway.tenant_file import write_tenants
from services.gateway.tenants import Tenant
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from thermocline.supervisor.api import running
from thermocline.supervisor.config import SupervisorConfig

MODEL = Path(__file__).parents[1] / "models" / "thermocline-mha"
VOCABULARY = 2_500
WARM_UP = 5
LEAD_MS = 10_000  # A busy machine may hold a scheduler up for longer than the default, and this is no chaos.
ALPHA = 0.01
TRIALS = 500
LEAKS = (0.05, 0.1, 0.2, 0.3, 0.5)
QUANTILES = ("p5", "p25", "p50", "p75", "p95")


@dataclass(slots=True)
class Asker:
    """Asks one cell under the keys of its tenants."""

    client: httpx.AsyncClient
    bus: Bus
    keys: dict[str, str]
    rng: random.Random

    def fresh(self, tokens: int) -> list[int]:
        return [self.rng.randrange(8, VOCABULARY) for _ in range(tokens)]

    async def ask(self, tenant: str, prompt: list[int]) -> tuple[float, int]:
        """Milliseconds to the first token, and how many tokens of the prompt were cached."""
        await rest(self.bus)
        body = {
            "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        begun = time.perf_counter()
        first_ms, cached = 0.0, 0
        async with self.client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    first_ms = first_ms or (time.perf_counter() - begun) * 1e3
                    usage = json.loads(line[6:]).get("usage")
                    cached = usage["prompt_tokens_details"]["cached_tokens"] if usage else cached
        return first_ms, cached


async def sample(asker: Asker, rounds: int, tokens: int) -> dict[str, list[float]]:
    """Times of every kind, one of each a round. Raises SystemExit if what was cached is not what the kind says."""
    times: dict[str, list[float]] = {"other": [], "fresh": [], "own": []}
    for number in range(WARM_UP + rounds):
        prompts = {"other": asker.fresh(tokens), "fresh": asker.fresh(tokens)}
        await asker.ask("first", prompts["other"])
        kinds = ["other", "fresh"]
        asker.rng.shuffle(kinds)
        for kind, prompt in [*((kind, prompts[kind]) for kind in kinds), ("own", prompts["other"])]:
            took_ms, cached = await asker.ask("second", prompt)
            if (kind == "own") != bool(cached):
                raise SystemExit(f"{cached} tokens were cached of a prompt that is {kind}")
            if number >= WARM_UP:
                times[kind].append(took_ms)
    return times


def rank_test(first: list[float], second: list[float]) -> tuple[float, float]:
    """(p, AUC) of the two-sided rank test: the chance of so large a difference between samples of one distribution, by
    the normal approximation with its correction for ties, and the chance that one of ``first`` is above one of
    ``second``.
    """
    ordered = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    count, ranks, ties, start = len(ordered), 0.0, 0.0, 0
    while start < count:
        end = start
        while end < count and ordered[end][0] == ordered[start][0]:
            end += 1
        middle = (start + 1 + end) / 2
        ranks += middle * sum(1 for _, group in ordered[start:end] if group == 0)
        ties += (end - start) ** 3 - (end - start)
        start = end
    n, m = len(first), len(second)
    above = ranks - n * (n + 1) / 2
    spread = math.sqrt(n * m / 12 * (count + 1 - ties / (count * (count - 1))))
    z = max(0.0, abs(above - n * m / 2) - 0.5) / spread if spread else 0.0
    return math.erfc(z / math.sqrt(2)), above / (n * m)


def power(fresh: list[float], gain_ms: float, rng: random.Random) -> float:
    """How often the test at ALPHA finds that one of two samples like ``fresh`` is faster by ``gain_ms``."""
    found = 0
    for _ in range(TRIALS):
        slower = rng.choices(fresh, k=len(fresh))
        faster = [value - gain_ms for value in rng.choices(fresh, k=len(fresh))]
        found += rank_test(faster, slower)[0] < ALPHA
    return found / TRIALS


def summary(times: dict[str, list[float]], seed: int) -> dict[str, Any]:
    """Quantiles of each kind, both tests, and the power by the share of a cached prefix's gain that leaks."""
    gain_ms = statistics.median(times["fresh"]) - statistics.median(times["own"])
    rng = random.Random(f"power:{seed}")
    tests = {}
    for kind in ("other", "own"):
        p, auc = rank_test(times[kind], times["fresh"])
        tests[f"{kind}_against_fresh"] = {"p": p, "auc": round(auc, 4)}
    return {
        "ttft_ms": {kind: dict(zip(QUANTILES, _quantiles(found), strict=True)) for kind, found in times.items()},
        **tests,
        "alpha": ALPHA,
        "cached_gain_ms": round(gain_ms, 3),
        "power_by_leaked_share_of_gain": {str(share): power(times["fresh"], share * gain_ms, rng) for share in LEAKS},
    }


def _quantiles(values: list[float]) -> list[float]:
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return [round(cuts[place], 3) for place in (0, 4, 9, 14, 18)]


async def drive(base_url: str, nats_url: str, keys: dict[str, str], rounds: int, tokens: int, seed: int) -> Any:
    async with AsyncExitStack() as stack:
        bus = await connect((nats_url,), "bench")
        stack.push_async_callback(bus.close)
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=base_url, timeout=300, verify=False, trust_env=False)
        )
        return await sample(Asker(client, bus, keys, random.Random(seed)), rounds, tokens)


def measure(folder: Path, *, rounds: int, tokens: int, seed: int) -> dict[str, list[float]]:
    """All times of one cell."""
    keys = {"first": new_key(), "second": new_key()}
    tenants = {name: Tenant(salt=new_salt(), keys=(key_hash(key.encode()),)) for name, key in keys.items()}
    write_tenants(folder / "tenants.toml", tenants)
    config = SupervisorConfig(model=str(MODEL), dtype="float32", port=0)
    environ = {"THERMOCLINE_TENANTS": str(folder / "tenants.toml"), "THERMOCLINE_LEAD_MS": str(LEAD_MS)}
    with running(config, environ=environ) as cell:
        times: dict[str, list[float]] = asyncio.run(drive(cell.base_url, cell.nats_url, keys, rounds, tokens, seed))
    return times


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed", "--save")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=384)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        times = measure(Path(scratch), rounds=options.rounds, tokens=options.tokens, seed=options.seed)
    results = {"rounds": options.rounds, "tokens": options.tokens, **summary(times, options.seed)}
    print(json.dumps(results, indent=1))
    if options.save:
        print(results_file.write("tenant_timing", results, seed=options.seed))
    if results["other_against_fresh"]["p"] < ALPHA:
        raise SystemExit("another tenant's prompt can be told from a fresh one")
    if results["own_against_fresh"]["p"] >= ALPHA:
        raise SystemExit("the test cannot tell a cached prompt from a fresh one, so it says nothing")


if __name__ == "__main__":
    main()
