"""TTFT of a prefix hit on the device and in host memory against recomputing it, at 512 to 8,192 tokens.

A whole cell on this machine with the ~100M-parameter Llama. For each length and repetition: a new prompt
(recomputed), the same again (device hit), then other prompts push it to host memory and it is asked again (host
hit). The cell evicts by recency, because the default policy would keep what was used twice. The three are measured in
alternation, so drift of the machine hits them alike.

``python -m bench.hits_vs_recompute [--repeats 5] [--lengths 512,1024,2048,4096,8192]``
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx

from bench import results_file
from bench.asking import ask_one
from bench.make_model import make_model
from thermocline.client import served_model
from thermocline.supervisor.api import running
from thermocline.supervisor.config import SupervisorConfig

VOCABULARY = 16_000
DEVICE_TOKENS = 10_240
FILLER_TOKENS = 2048


async def measure(base_url: str, *, lengths: list[int], repeats: int, seed: int) -> dict[str, Any]:
    """Median TTFT in ms per length and source, and how many times faster than recomputing."""
    rng = random.Random(seed)

    def fresh(length: int) -> list[int]:
        return [rng.randrange(8, VOCABULARY) for _ in range(length)]

    table: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=base_url, timeout=300, trust_env=False) as client:
        model = (await served_model(client))["id"]
        await ask_one(client, model, fresh(512))
        for length in lengths:
            times: dict[str, list[float]] = {"recomputed": [], "device": [], "host": []}
            for _ in range(repeats):
                prompt = fresh(length)
                first = await ask_one(client, model, prompt)
                again = await ask_one(client, model, prompt)
                # More than the pool holds, in other prompts, leaves nothing of this one on the device.
                for _ in range(DEVICE_TOKENS // FILLER_TOKENS + 1):
                    await ask_one(client, model, fresh(FILLER_TOKENS))
                back = await ask_one(client, model, prompt)
                for name, answer in (("recomputed", first), ("device", again), ("host", back)):
                    if answer.source != name or answer.token_ids != first.token_ids:
                        raise SystemExit(f"{length} tokens: wanted {name}, got {answer}")
                    times[name].append(answer.ttft_s * 1e3)
            medians = {name: statistics.median(values) for name, values in times.items()}
            table[str(length)] = {
                "ttft_ms": medians,
                "device_speedup": medians["recomputed"] / medians["device"],
                "host_speedup": medians["recomputed"] / medians["host"],
            }
            print(length, table[str(length)], flush=True)
    return {"repeats": repeats, "by_prompt_tokens": table}


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed")
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "llama-88m", seed=options.seed)
        # 12 layers of 4 KV heads of 64 in float32: 24 KiB a token.
        config = SupervisorConfig(
            model=str(model),
            dtype="float32",
            port=0,
            policy="lru",
            device_kv_bytes=DEVICE_TOKENS * 24_576,
            host_kv_bytes=3 * 2**30,
        )
        with running(config) as cell:
            lengths = [int(part) for part in options.lengths.split(",")]
            results = asyncio.run(measure(cell.base_url, lengths=lengths, repeats=options.repeats, seed=options.seed))
    print(results_file.write("hits_vs_recompute", results | {"dtype": "float32"}, seed=options.seed))


if __name__ == "__main__":
    main()
