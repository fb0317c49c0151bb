"""What deferral on a delay hit and bubble filling bring on this machine, each on and off (Strata 4.3.1, 4.3.3).

Two parts, each on fresh cells of separate processes, with the ~100M-parameter Llama or the model given:

- a burst of requests on one new document: time to first token, and the prefill tokens that the worker computed;
- questions on documents that lie in host memory while other requests decode: time to first token of the questions,
  gaps between tokens of the others, and what the worker counted of bubbles and stalls.

The host link of this machine is a copy between two regions of one memory, by a core that decoding wants too. What a
bubble hides there is little; the figures say how much.

``python -m bench.bursts [--model DIR] [--requests 32] [--document 2000] [--questions 12]``
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from bench import results_file
from bench.make_model import make_model
from shared import subjects
from shared.bus.nats_bus import connect
from shared.codec import decode, encode
from shared.messages.status import GetInventory, Inventory
from thermocline.client import Answer, served_model, stream_answer
from thermocline.client.figures import quantile
from thermocline.supervisor.api import running
from thermocline.supervisor.config import SupervisorConfig

QUESTION_TOKENS = 32
ANSWER_TOKENS = 4
DECODERS = 8
DOCUMENTS = 4
START_S = 120.0


async def worker_counters(nats_url: str) -> dict[str, int]:
    """What the cell's one worker has done so far."""
    bus = await connect(tuple(nats_url.split(",")), "bench")
    try:
        answer = await bus.call(subjects.rpc("worker", "inventory", "worker-0"), encode(GetInventory()))
        return decode(answer, Inventory).counters
    finally:
        await bus.close()


class Load:
    """A client of one cell, with prompts of its own seed."""

    def __init__(self, client: httpx.AsyncClient, model: dict[str, Any], seed: int) -> None:
        """``model`` is the server's entry of it."""
        self._client = client
        self._model = model["id"]
        self._vocabulary = model["vocab_size"]
        self._rng = random.Random(seed)

    def fresh(self, tokens: int) -> list[int]:
        return [self._rng.randrange(8, self._vocabulary) for _ in range(tokens)]

    def body(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return body | {"ignore_eos": True, "return_token_ids": True}

    async def ask(self, prompt: list[int]) -> Answer:
        return await stream_answer(self._client, "/v1/completions", self.body(prompt, ANSWER_TOKENS))

    async def decode(self, max_tokens: int, stamps: list[float], begun: asyncio.Event) -> None:
        """Stream one long answer to a short prompt; ``stamps`` gets the time of each message with tokens."""
        body = self.body(self.fresh(64), max_tokens) | {"stream": True}
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if data.startswith("{") and any(one.get("token_ids") for one in json.loads(data).get("choices", ())):
                    stamps.append(time.perf_counter())
                    begun.set()


def spread(values: list[float]) -> dict[str, float]:
    """Mean, median and 99th percentile."""
    return {"mean": statistics.fmean(values), "p50": quantile(values, 0.5), "p99": quantile(values, 0.99)}


async def burst(load: Load, nats_url: str, options: argparse.Namespace) -> dict[str, Any]:
    """All requests at once on one document that is new to the cell."""
    await load.ask(load.fresh(64))
    before = await worker_counters(nats_url)
    document = load.fresh(options.document)
    started = time.perf_counter()
    asked = [load.ask(document + load.fresh(QUESTION_TOKENS)) for _ in range(options.requests)]
    answers = await asyncio.gather(*asked)
    seconds = time.perf_counter() - started
    after = await worker_counters(nats_url)
    return {
        "ttft_ms": spread([answer.ttft_s * 1e3 for answer in answers]),
        "seconds": seconds,
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "prefill_tokens_computed": after["prefill_tokens_computed"] - before["prefill_tokens_computed"],
        "bubble_seconds": (after["bubble_us"] - before["bubble_us"]) / 1e6,
    }


async def questions(load: Load, nats_url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Questions on documents in turn, each of which has been pushed out since its last, beside decoding requests."""
    documents = [load.fresh(options.host_document) for _ in range(DOCUMENTS)]
    for document in documents:
        await load.ask(document + load.fresh(QUESTION_TOKENS))
    before = await worker_counters(nats_url)
    stamps: list[list[float]] = [[] for _ in range(DECODERS)]
    begun = [asyncio.Event() for _ in range(DECODERS)]
    decoding = [
        asyncio.create_task(load.decode(options.decode, each, event)) for each, event in zip(stamps, begun, strict=True)
    ]
    async with asyncio.timeout(START_S):
        await asyncio.gather(*(event.wait() for event in begun))
    answers: list[Answer] = []
    beside = 0  # Questions during which everything decoded.
    began = time.perf_counter()
    for number in range(options.questions):
        answers.append(await load.ask(documents[number % DOCUMENTS] + load.fresh(QUESTION_TOKENS)))
        beside += not any(task.done() for task in decoding)
    ended = time.perf_counter()
    await asyncio.gather(*decoding)
    after = await worker_counters(nats_url)
    hits = sum(answer.source == "host" for answer in answers)
    if not hits:
        raise SystemExit("no document came from host memory: there was no load to fill")
    gaps = [
        (late - early) * 1e3 for each in stamps for early, late in itertools.pairwise(each) if began <= late <= ended
    ]
    grown = {name: after[name] - before[name] for name in after}
    return {
        "ttft_ms": spread([answer.ttft_s * 1e3 for answer in answers]),
        "host_hits": hits,
        "questions_beside_decoding": beside,
        "gap_ms": spread(gaps) | {"max": max(gaps)},
        "seconds": ended - began,
        "bubble_seconds": grown["bubble_us"] / 1e6,
        "bubble_tokens": grown["bubble_tokens"],
        "load_stall_seconds": grown["load_stall_us"] / 1e6,
        "load_bytes": grown["load_bytes"],
    }


def kv_token_bytes(model: Path) -> int:
    """KV of one token in float32."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * 4)


def on_a_cell(model: Path, part: Any, environ: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Run one part on a cell of its own whose scheduler has these settings."""
    token_bytes = kv_token_bytes(model)
    config = SupervisorConfig(
        model=str(model),
        dtype="float32",
        port=0,
        device_kv_bytes=options.device_tokens * token_bytes,
        host_kv_bytes=2 * DOCUMENTS * options.host_document * token_bytes,
    )

    async def measure(base_url: str, nats_url: str) -> dict[str, Any]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=base_url, timeout=900, limits=limits, trust_env=False) as client:
            load = Load(client, await served_model(client), options.seed)
            found: dict[str, Any] = await part(load, nats_url, options)
            return found

    with running(config, environ=environ) as cell:
        return asyncio.run(measure(cell.base_url, cell.nats_url))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; without it a Llama of ~100M is made")
    parser.add_argument("--requests", type=int, default=32, help="of the burst")
    parser.add_argument("--document", type=int, default=2000, help="tokens of the burst's document")
    parser.add_argument("--host-document", type=int, default=4096, help="tokens of each document in host memory")
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--decode", type=int, default=400, help="tokens that each request beside decodes")
    parser.add_argument("--device-tokens", type=int, default=12_288, help="size of the device pool")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.model is not None and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: there is no config.json")
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or make_model(Path(folder) / "llama-88m", seed=options.seed)
        settings = {name: value for name, value in vars(options).items() if name not in ("model", "seed")}
        results: dict[str, Any] = {"model": model.name, "dtype": "float32", "settings": settings}
        results |= {"burst": {}, "questions": {}}
        for name, tokens in (("deferral", "100"), ("no_deferral", "0")):
            results["burst"][name] = on_a_cell(model, burst, {"THERMOCLINE_DEFER_TOKENS": tokens}, options)
            print_part("burst", name, results["burst"][name])
        for name, filling in (("bubble_filling", "on"), ("no_bubble_filling", "off")):
            results["questions"][name] = on_a_cell(model, questions, {"THERMOCLINE_BUBBLE_FILLING": filling}, options)
            print_part("questions", name, results["questions"][name])
    print(results_file.write("bursts", results, seed=options.seed))


def print_part(part: str, name: str, figures: dict[str, Any]) -> None:
    """One line a figure."""
    print(f"{part}: {name}")
    for figure, value in figures.items():
        shown = {key: round(number, 1) for key, number in value.items()} if isinstance(value, dict) else value
        print(f"  {figure:26} {shown}", flush=True)


if __name__ == "__main__":
    main()
