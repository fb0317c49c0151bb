"""How much of a request's TTFT broker and scheduler take when the cell is idle.

One request at a time against a whole cell on this machine (every process real, NATS real). For each request the
gateway reports when it was received, stored in the stream, admitted at the worker, and when its first step began;
everything before the first step is the share of broker and scheduler. Target: at most 2 ms at p99.

``python -m bench.broker_share [--requests 500]``
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx

from bench import results_file
from thermocline.client import served_model, stream_answer
from thermocline.client.figures import BROKER_STEPS, quantile
from thermocline.supervisor.api import running
from thermocline.supervisor.config import SupervisorConfig, bundled_model


async def measure(base_url: str, *, requests: int, seed: int) -> dict[str, Any]:
    """Quantiles in ms of each part, over requests with prompts of 16 to 256 tokens."""
    rng = random.Random(seed)
    rows: list[dict[str, float]] = []
    async with httpx.AsyncClient(base_url=base_url, timeout=60, trust_env=False) as client:
        model = (await served_model(client))["id"]
        for number in range(requests + 20):
            prompt = [rng.randrange(8, 2000) for _ in range(rng.randrange(16, 257))]
            body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "timing": True}
            answer = await stream_answer(client, "/v1/completions", body)
            if number >= 20:  # The first requests warm up caches and connections.
                known = {name: value or 0.0 for name, value in answer.timing_ms.items()}
                rows.append(known | {"client_ttft_ms": answer.ttft_s * 1e3})
    parts = {}
    for name in sorted(rows[0]):
        values = [row[name] for row in rows]
        parts[name] = {"p50": quantile(values, 0.5), "p90": quantile(values, 0.9), "p99": quantile(values, 0.99)}
    before = [sum(row[step] for step in BROKER_STEPS) for row in rows]
    share = {"p50": quantile(before, 0.5), "p90": quantile(before, 0.9), "p99": quantile(before, 0.99)}
    return {"requests": requests, "broker_and_scheduler_ms": share, "target_p99_ms": 2.0, "parts": parts}


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed")
    parser.add_argument("--requests", type=int, default=500)
    options = parser.parse_args()
    config = SupervisorConfig(model=str(bundled_model()), dtype="float32", port=0)
    with running(config) as cell:
        results = asyncio.run(measure(cell.base_url, requests=options.requests, seed=options.seed))
    path = results_file.write("broker_share", results, seed=options.seed)
    print(results["broker_and_scheduler_ms"], "->", path)


if __name__ == "__main__":
    main()
