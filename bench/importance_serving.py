"""TTFT and bytes from the disk when only important tokens are loaded, by technique (IMPRESS, Figures 16 to 21).

    python -m bench.importance_serving [--ratio 0.1] [--probe-heads 1] [--mb-per-s 5,20,80] [--systems NAME,...]
    [--workload linked] [--documents 12] [--questions 120] [--rounds 2] [--add FILE] [--name NAME] [--save]

Whole cells with a bundled model, whose storage reads its disk through a token bucket. Documents share nothing; each is
asked about as often as a normal distribution has it, as in the paper, and the pools on the device and in host memory
hold the shares of all KV that the paper's 10 and 32 GB were of its 60 or so. Every document is computed and saved once,
and questions are asked before anything is measured, so that caches are warm and rows on the disk have settled.

The systems build on each other as in the paper. ``recompute`` keeps nothing; ``everything`` loads all KV (AS-like);
``h2o_lru`` and ``h2o_lfu`` read the keys of all heads to choose, by a threshold that no layer passes, and read blocks
of 64 tokens, the paper's chunks; ``identification`` asks the probe heads; ``blocks`` reads blocks as small as the disk
allows; ``policy`` evicts by Thermocline's own policy; with ``score`` that unites importance with hotness, and what is
hot comes up to host memory. ``on_demand`` is the same without prefetching the keys that the next layer chooses by. All
of these read in part wherever they can; ``planned`` only where that is expected to be faster than computing and than
all KV: Thermocline as it comes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoTokenizer

from bench import results_file
from bench.emptying import rest
from bench.importance_prompts import Prefix, prefixes, weights_sha256
from services.gateway.cache_calls import CacheCalls
from services.scheduler.core.speed_fit import IMPORTANT_FROM_DISK
from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from shared.codec import decode, encode
from shared.messages.status import GetInventory, Inventory
from thermocline.client import Answer, served_model, stream_answer
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.model_demand import geometry_of

DEVICE_SHARE, HOST_SHARE = 0.17, 0.53
ANSWER_TOKENS = 12
PAPER_CHUNK = "64"
BYTES_READ = ("bytes_fetched", "sparse_bytes_read", "disk_bytes_read")
"""Counters of the storage: whole chunks, in part, and all, which is these and what copying upwards reads."""


@dataclass(frozen=True, slots=True)
class System:
    """Settings of one cell; ``is_lossy`` says how it is asked."""

    is_lossy: bool
    settings: dict[str, str] = field(default_factory=dict)


_ALWAYS = {"RESTORING": "important"}
_BLOCKS = _ALWAYS | {"IMPORTANCE_CACHING": "false"}
_CHUNKS = _BLOCKS | {"SPARSE_BLOCK_TOKENS": PAPER_CHUNK}
_ALL_KEYS = {"IMPORTANCE_ALPHA": "0", "IMPORTANCE_PROBE_HEADS": "3"}
SYSTEMS = {
    "recompute": System(False, {"RESTORING": "recompute", "POLICY": "lru"}),
    "everything": System(False, {"RESTORING": "kv", "POLICY": "lru"}),
    "h2o_lru": System(True, {"POLICY": "lru"} | _CHUNKS | _ALL_KEYS),
    "h2o_lfu": System(True, {"POLICY": "lfu"} | _CHUNKS | _ALL_KEYS),
    "identification": System(True, {"POLICY": "lfu"} | _CHUNKS),
    "blocks": System(True, {"POLICY": "lfu"} | _BLOCKS),
    "policy": System(True, _BLOCKS),
    "score": System(True, _ALWAYS),
    "on_demand": System(True, _ALWAYS | {"PREFETCH_KEYS": "false"}),
    "planned": System(True),
}


def questions_asked(documents: Sequence[Prefix], count: int, seed: int) -> list[tuple[int, int]]:
    """(Document, question) in the order in which they are asked; documents by a normal distribution (IMPRESS 6.1)."""
    rng = random.Random(f"{seed} asked")
    middle, spread = (len(documents) - 1) / 2, len(documents) / 5
    asked = []
    for _ in range(count):
        document = min(len(documents) - 1, max(0, round(rng.gauss(middle, spread))))
        asked.append((document, rng.randrange(len(documents[document].questions))))
    return asked


async def ask(client: httpx.AsyncClient, model: str, tokens: list[int], cache: dict[str, Any]) -> Answer:
    body: dict[str, Any] = {"model": model, "prompt": tokens, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    return await stream_answer(client, "/v1/completions", body | {"cache": cache})


async def counters(bus: Bus) -> dict[str, int]:
    """Of the cell's storage."""
    (name,) = (await CacheCalls(bus).status()).storages
    answer = await bus.call(subjects.rpc("storage", "inventory", name), encode(GetInventory()))
    return decode(answer, Inventory).counters


async def waited_s(bus: Bus) -> float:
    """For which computation has waited for sparse prefixes so far."""
    found = (await CacheCalls(bus).status()).restorations
    return sum(one.observed_seconds for one in found if one.kind == IMPORTANT_FROM_DISK)


async def measure(
    base_url: str, nats: str, system: System, documents: list[Prefix], options: argparse.Namespace
) -> dict[str, Any]:
    """One round in a cell: warm, then ask one after the other."""
    cache = {"fidelity": "importance", "ratio": options.ratio} if system.is_lossy else {}
    bus = await connect((nats,), "bench")
    times, lossy_ms, right, lossy, fallen, layers, sources = [], [], 0, 0, 0, 0, dict[str, int]()
    async with httpx.AsyncClient(base_url=base_url, timeout=600, trust_env=False) as client:
        model = (await served_model(client))["id"]
        await rest(bus)
        for document in documents:
            await ask(client, model, document.tokens + document.questions[0][0], {})
            await rest(bus)
        for number, question in questions_asked(documents, len(documents) * 2, options.seed + 1):
            await ask(client, model, documents[number].tokens + documents[number].questions[question][0], cache)
        await rest(bus)
        before, waited = await counters(bus), await waited_s(bus)
        for number, question in questions_asked(documents, options.questions, options.seed):
            tail, expected = documents[number].questions[question]
            answer = await ask(client, model, documents[number].tokens + tail, cache)
            times.append(answer.ttft_s * 1e3)
            right += answer.text.strip().startswith(expected)
            for source in ("device", "host", "disk", "sparse"):
                sources[source] = sources.get(source, 0) + getattr(answer, f"{source}_tokens")
            if answer.importance:
                lossy += 1
                lossy_ms.append(answer.ttft_s * 1e3)
                fallen += answer.importance["layers_fallen_back"]
                layers += answer.importance["layers"]
            await rest(bus)
        after, waited = await counters(bus), await waited_s(bus) - waited
    await bus.close()
    return {
        "ttft_ms": times,
        "right": right,
        "lossy": lossy,
        "layers": layers,
        "layers_fallen_back": fallen,
        "found_tokens": sources,
        "disk_bytes": {name: after[name] - before[name] for name in BYTES_READ},
        "lossy_ms": lossy_ms,
        "waited_s": waited,
    }


@contextmanager
def cell_on_disk(
    model: Path, folder: Path, mb_per_s: float, pools: tuple[int, int], settings: dict[str, str], probe_heads: int
) -> Iterator[RunningCell]:
    """Run a cell whose disk in ``folder`` gives ``mb_per_s``, with device and host ``pools`` of so many bytes."""
    config = SupervisorConfig(
        model=str(model),
        dtype="float32",
        port=0,
        device_kv_bytes=pools[0],
        host_kv_bytes=pools[1],
        disk_dir=(str(folder),),
        disk_kv_bytes=16 * 2**30,
    )
    settings = {
        "SPARSE": "true",
        "IMPORTANCE": "on",
        "IMPORTANCE_PROBE_HEADS": str(probe_heads),
        "DISK_READ_BYTES_PER_S": str(int(mb_per_s * 1e6)),
        # A whole wait, so that a slow way shows as slow and not as recomputed.
        "PREFETCH_WAIT": "full",
        "FETCH_DEADLINE_MS": "600000",
        **settings,
    }
    with running(config, environ={f"THERMOCLINE_{key}": value for key, value in settings.items()}) as cell:
        yield cell


def kv_bytes_of(model: Path, documents: list[Prefix]) -> int:
    """Return the bytes of KV of all documents in float32."""
    return sum(len(document.tokens) for document in documents) * geometry_of(model, "float32").token_bytes


def bench_system(
    model: Path, folder: Path, name: str, mb_per_s: float, documents: list[Prefix], options: argparse.Namespace
) -> dict[str, Any]:
    """One round of one system in a cell of its own."""
    system, kv_bytes = SYSTEMS[name], kv_bytes_of(model, documents)
    pools = int(kv_bytes * DEVICE_SHARE) + options.own_bytes, int(kv_bytes * HOST_SHARE)
    settings = {"HIDDEN_FORM": "off", **system.settings}
    with cell_on_disk(model, folder, mb_per_s, pools, settings, options.probe_heads) as cell:
        return asyncio.run(measure(cell.base_url, cell.nats_url, system, documents, options))


def joined(rounds: list[dict[str, Any]], questions: int) -> dict[str, Any]:
    """Figures of one system at one bandwidth, over all its rounds."""
    times = sorted(time for each in rounds for time in each["ttft_ms"])
    lossy_ms = [time for each in rounds for time in each["lossy_ms"]]
    layers = sum(each["layers"] for each in rounds)
    asked = questions * len(rounds)
    return {
        "ttft_mean_ms": round(statistics.mean(times), 1),
        "ttft_p50_ms": round(statistics.median(times), 1),
        "ttft_p99_ms": round(times[min(len(times) - 1, int(0.99 * len(times)))], 1),
        "right": round(sum(each["right"] for each in rounds) / asked, 4),
        "lossy": round(sum(each["lossy"] for each in rounds) / asked, 4),
        "fallen_back": round(sum(each["layers_fallen_back"] for each in rounds) / layers, 4) if layers else 0.0,
        "bytes_per_question": {
            name: round(sum(each["disk_bytes"][name] for each in rounds) / asked) for name in BYTES_READ
        },
        "waited_lossy_ms": round(sum(each["waited_s"] for each in rounds) / len(lossy_ms) * 1e3, 1)
        if lossy_ms
        else None,
        "ttft_lossy_ms": round(statistics.mean(lossy_ms), 1) if lossy_ms else None,
        "found_tokens": {
            source: sum(each["found_tokens"][source] for each in rounds) for source in rounds[0]["found_tokens"]
        },
    }


def earlier(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Figures of an earlier run that this one does not measure anew."""
    if options.add is None:
        return []
    anew = {(float(mb), system) for mb in options.mb_per_s.split(",") for system in options.systems.split(",")}
    known = json.loads(options.add.read_text(encoding="utf-8"))["results"]["figures"]
    return [each for each in known if (each["mb_per_s"], each["system"]) not in anew]


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed", "--save")
    parser.add_argument("--model", type=Path, default=Path("models/thermocline-mha"))
    parser.add_argument("--ratio", type=float, default=0.1)
    parser.add_argument("--probe-heads", type=int, default=1)
    parser.add_argument("--mb-per-s", default="5,20,80")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--document-tokens", type=int, default=3000)
    parser.add_argument("--workload", choices=("documents", "linked"), default="documents")
    parser.add_argument("--questions", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--own-bytes", type=int, default=8 * 2**20, help="device memory for requests' own tokens")
    parser.add_argument("--add", type=Path, help="results of an earlier run, whose other figures are kept")
    parser.add_argument("--name", default="importance_serving", help="of the file in bench/results")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    documents = prefixes(options.workload, options.documents, options.document_tokens, 8, tokenizer, options.seed)
    figures = earlier(options)
    results = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(options).items()
        if key not in ("save", "add", "name")
    } | {
        "weights_sha256": weights_sha256(options.model),
        "prefix_tokens": [len(document.tokens) for document in documents],
        "figures": figures,
    }
    for mb_per_s in [float(each) for each in options.mb_per_s.split(",")]:
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in options.systems.split(",")}
        with tempfile.TemporaryDirectory() as scratch:
            for turn in range(options.rounds):
                for name, found in rounds.items():
                    began = time.monotonic()
                    folder = Path(scratch) / f"{name}-{turn}"
                    folder.mkdir()
                    found.append(bench_system(options.model, folder, name, mb_per_s, documents, options))
                    shown = json.dumps(joined(found[-1:], options.questions))
                    spent = f"({time.monotonic() - began:.0f} s)"
                    print(f"{mb_per_s:g} MB/s {name:<15} {shown} {spent}", flush=True)
        figures += [
            {"mb_per_s": mb_per_s, "system": name, **joined(found, options.questions)} for name, found in rounds.items()
        ]
        if options.save:
            print(results_file.write(options.name, results, seed=options.seed), flush=True)


if __name__ == "__main__":
    main()
