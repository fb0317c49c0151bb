"""A prefix on the disk: dispatched when its turn comes (Strata 4.2.1), or waited for, on this machine.

A whole cell with an 88M Llama of random weights for each setting of ``prefetch_wait``, one after another and then in
the other order. Documents are computed once and then lie on the disk alone. Then come questions, ``idle`` one at a
time, and ``queued`` all at once, each about another document, so that all but the first wait in the queue while their
prefixes are fetched. Reported are the prompt tokens that were found in the cache (counts, which other work of the
machine changes little) and times to the first token (which it changes much), of each run.

``python -m bench.fetch_waits [--documents 6] [--tokens 1024] [--directory DIR]``
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx

from bench import results_file
from bench.asking import ask_one
from bench.emptying import empty, rest
from bench.make_model import make_model
from shared.bus.nats_bus import connect
from thermocline.client import Answer, served_model
from thermocline.supervisor.api import running
from thermocline.supervisor.config import SupervisorConfig

VOCABULARY = 16_000
QUESTION_TOKENS = 32
TOKEN_BYTES = 24_576
WAITS = ("best_effort", "deadline")
ORDER = (*WAITS, *reversed(WAITS))


async def measure(base_url: str, nats: str, *, documents: int, tokens: int, seed: int) -> dict[str, Any]:
    """One cell's run."""
    rng = random.Random(seed)

    def fresh(length: int) -> list[int]:
        return [rng.randrange(8, VOCABULARY) for _ in range(length)]

    bus = await connect((nats,), "bench")
    found: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=base_url, timeout=900, trust_env=False) as client:
        model = (await served_model(client))["id"]
        await rest(bus)
        texts = [fresh(tokens) for _ in range(documents)]
        for text in texts:
            await ask_one(client, model, text + fresh(QUESTION_TOKENS))
        for name in ("idle", "queued"):
            await empty(bus, ("device", "host"))
            questions = [text + fresh(QUESTION_TOKENS) for text in texts]
            if name == "idle":
                answers = [await ask_one(client, model, question) for question in questions]
            else:
                answers = await asyncio.gather(*(ask_one(client, model, question) for question in questions))
            found[name] = figures(list(answers), tokens)
    await bus.close()
    return found


def figures(answers: list[Answer], tokens: int) -> dict[str, float]:
    """Of one series of questions."""
    return {
        "disk_tokens_share": sum(answer.disk_tokens for answer in answers) / (len(answers) * tokens),
        "cached_tokens_share": sum(answer.cached_tokens for answer in answers) / (len(answers) * tokens),
        "mean_ttft_ms": statistics.fmean(answer.ttft_s * 1e3 for answer in answers),
        "longest_ttft_ms": max(answer.ttft_s * 1e3 for answer in answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--directory", default="", help="where the disk tier lies; default: temporary")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {wait: [] for wait in WAITS}
    for number, wait in enumerate(ORDER):
        with tempfile.TemporaryDirectory(dir=options.directory or None) as folder:
            model = make_model(Path(folder) / "llama-88m", seed=options.seed)
            (Path(folder) / "disk").mkdir()
            room = 2 * options.documents * (options.tokens + 512) * TOKEN_BYTES
            config = SupervisorConfig(
                model=str(model),
                dtype="float32",
                port=0,
                device_kv_bytes=room,
                host_kv_bytes=room,
                disk_dir=(f"{folder}/disk",),
                disk_kv_bytes=2**30,
            )
            with running(config, environ={"THERMOCLINE_PREFETCH_WAIT": wait}) as cell:
                found = asyncio.run(
                    measure(
                        cell.base_url,
                        cell.nats_url,
                        documents=options.documents,
                        tokens=options.tokens,
                        seed=options.seed + number // len(WAITS),
                    )
                )
        runs[wait].append(found)
        print(wait, found, flush=True)
    shape = {"documents": options.documents, "tokens": options.tokens}
    print(results_file.write("fetch_waits", shape | {"runs": runs}, seed=options.seed))


if __name__ == "__main__":
    main()
