"""Whether greedy answers are the same tokens however the prefix came, by default and in the exact mode.

A whole cell with the bundled model, trained, in bfloat16. Documents are asked about with prefix caching off, then with
their KV on the device, then with it in host memory, then all at once, so that batches have other shapes. Each answer of
48 tokens is compared with the first one. By default rounding depends on the shape of a batch, so near-ties may differ
(the share is the figure); in the exact mode, which needs a GPU, none may, and one that does fails the part. A version
without that mode is reported as missing it.

``python -m bench.gpu.tokens [--quick | --cpu] [--seconds 40]``
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec

from bench.emptying import empty, rest
from bench.gpu import reading
from bench.gpu.from_disk import configure
from bench.gpu.served_cases import PLAIN
from bench.gpu.small_cell import answer, questions, small_cell, worker_has
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from thermocline.client import Answer, served_model
from thermocline.demo.workload import Ask
from thermocline.supervisor.api import RunningCell

EXACT = "exact"
"""The worker's setting of the exact mode."""

WAYS = ("device", "host", "together")
"""How the prefix of an answer came: from the device, from host memory, or in one batch with all others'."""

_CACHED = msgspec.structs.replace(PLAIN, host_writes="through")
_UNCACHED = msgspec.structs.replace(PLAIN, prefix_caching=False)


async def compared(cell: RunningCell, asks: list[Ask]) -> dict[str, Any]:
    """Answers that equal those without the cache, by way, and tokens that were found in it."""
    bus = await connect((cell.nats_url,), "bench")
    try:
        async with httpx.AsyncClient(base_url=cell.base_url, timeout=120, trust_env=False) as client:
            model = (await served_model(client))["id"]
            await configure(bus, _UNCACHED)
            expected = [await answer(client, model, ask) for ask in asks]
            await configure(bus, _CACHED)
            for ask in asks:
                await answer(client, model, ask)
            await rest(bus)
            found = {"device": [await answer(client, model, ask) for ask in asks]}
            found["host"] = [await _from_host(bus, client, model, ask) for ask in asks]
            found["together"] = list(await asyncio.gather(*(answer(client, model, ask) for ask in asks)))
            return {way: _judged(expected, answers) for way, answers in found.items()}
    finally:
        await bus.close()


async def _from_host(bus: Bus, client: httpx.AsyncClient, model: str, ask: Ask) -> Answer:
    await empty(bus, ("device",))
    found = await answer(client, model, ask)
    await rest(bus)
    return found


def _judged(expected: list[Answer], answers: list[Answer]) -> dict[str, Any]:
    pairs = [(one.token_ids, other.token_ids) for one, other in zip(expected, answers, strict=True)]
    return {
        "answers": len(pairs),
        "equal": sum(one == other for one, other in pairs),
        "first_differences": [_first_difference(*pair) for pair in pairs if pair[0] != pair[1]],
        "device_tokens": sum(each.device_tokens for each in answers),
        "host_tokens": sum(each.host_tokens for each in answers),
    }


def _first_difference(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def headline(results: dict[str, Any]) -> reading.Headline:
    """Equal answers by mode and way, and why there is no exact mode."""
    lines: list[tuple[str, float | None, str]] = []
    for mode, found in results["modes"].items():
        for way, each in found.items():
            lines.append((f"{mode} mode, {way}", float(each["equal"]), f"of {each['answers']} answers equal"))
    if "no_exact_mode" in results:
        lines.append(("exact mode", None, results["no_exact_mode"]))
    return lines


def main() -> None:
    run = reading.begin("tokens", __doc__)
    dtype = run.choose("bfloat16", "bfloat16", "float32")
    asks = questions(run.choose(16, 6, 3), seed=5)
    modes: dict[str, Any] = {}
    results: dict[str, Any] = {"dtype": dtype, "modes": modes}
    settings: dict[str, dict[str, str]] = {"default": {}}
    if run.is_tiny:
        results["no_exact_mode"] = "not on a processor"
    elif worker_has(EXACT):
        settings["exact"] = {EXACT: "true"}
    else:
        results["no_exact_mode"] = "missing: this version's workers have no such setting"
    for mode in run.each(settings):
        with small_cell(run.device.type, dtype, **settings[mode]) as cell:
            modes[mode] = asyncio.run(compared(cell, asks))
        run.keep(results)
        if mode == "exact" and any(each["equal"] < each["answers"] for each in modes[mode].values()):
            raise SystemExit(f"the exact mode gave other tokens: {modes[mode]}")
        if not modes[mode]["host"]["host_tokens"] or not modes[mode]["device"]["device_tokens"]:
            raise SystemExit(f"the cache was not used, so nothing was compared: {modes[mode]}")
    run.finish(results, headline(results))


if __name__ == "__main__":
    main()
