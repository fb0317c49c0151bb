"""The whole server against Hugging Face ``generate`` on the same weights, threads and machine, in alternation.

Ours is measured as a client sees it: HTTP, SSE, broker and scheduler included, prefix cache off. Prefill is TTFT at
512 and 2,048 prompt tokens; decode is tokens per second over 64 tokens after 512, for 1 and for 8 requests at
once (``generate`` gets the same 8 prompts as one batch). Targets: prefill >= 0.97x, decode of one >= 0.9x, of
eight >= 1.3x.

``python -m bench.serving_vs_generate [--dtype float32] [--rounds 7]``
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench import results_file
from bench.make_model import make_model
from thermocline.client import Answer, served_model, stream_answer
from thermocline.supervisor.api import running
from thermocline.supervisor.config import SupervisorConfig

VOCABULARY = 16_000
DECODE_TOKENS = 64
DECODE_CONTEXT = 512
TARGETS = {"prefill_512": 0.97, "prefill_2048": 0.97, "decode_batch_1": 0.9, "decode_batch_8": 1.3}


class Ours:
    """The server, asked over HTTP."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url

    def answers(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        return asyncio.run(self._answers(prompts, max_tokens))

    async def _answers(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        async with httpx.AsyncClient(base_url=self._base_url, timeout=300, trust_env=False) as client:
            model = (await served_model(client))["id"]
            body = {"model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
            body |= {"return_token_ids": True, "cache": {"read": False, "write": False}}
            asked = (stream_answer(client, "/v1/completions", body | {"prompt": prompt}) for prompt in prompts)
            return await asyncio.gather(*asked)

    def prefill_s(self, prompt: list[int]) -> float:
        (answer,) = self.answers([prompt], 1)
        return answer.ttft_s

    def decode_s(self, prompts: list[list[int]]) -> float:
        """Seconds from the last request's first token to the last token of all."""
        answers = self.answers(prompts, DECODE_TOKENS)
        # All were sent at once, so times since their own start compare.
        return max(a.total_s for a in answers) - max(a.ttft_s for a in answers)


class Theirs:
    """``model.generate`` with its own KV cache."""

    def __init__(self, model_dir: Path, dtype: str) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
        self._model.eval()

    def _generate_s(self, prompts: list[list[int]], max_tokens: int) -> float:
        ids = torch.tensor(prompts)
        started = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
            )
        return time.perf_counter() - started

    def prefill_s(self, prompt: list[int]) -> float:
        return self._generate_s([prompt], 1)

    def decode_s(self, prompts: list[list[int]]) -> float:
        """Seconds for the tokens after the first: a whole run less a run of one token."""
        return self._generate_s(prompts, DECODE_TOKENS) - self._generate_s(prompts, 1)


def compare(ours: Ours, theirs: Theirs, *, rounds: int, seed: int) -> dict[str, Any]:
    """Medians of both, and the median of the ratios of neighbouring runs (above 1: ours is faster)."""
    rng = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(8, VOCABULARY) for _ in range(length)]

    def decode(batch: int) -> Callable[[], Callable[[Ours | Theirs], float]]:
        def make() -> Callable[[Ours | Theirs], float]:
            prompts = [prompt(DECODE_CONTEXT) for _ in range(batch)]
            return lambda side: batch * (DECODE_TOKENS - 1) / side.decode_s(prompts)

        return make

    def prefill(length: int) -> Callable[[], Callable[[Ours | Theirs], float]]:
        def make() -> Callable[[Ours | Theirs], float]:
            tokens = prompt(length)
            return lambda side: length / side.prefill_s(tokens)

        return make

    cases = {
        "prefill_512": prefill(512),
        "prefill_2048": prefill(2048),
        "decode_batch_1": decode(1),
        "decode_batch_8": decode(8),
    }
    table: dict[str, Any] = {}
    for name, make in cases.items():
        speeds: list[tuple[float, float]] = []
        for number in range(rounds + 1):
            run = make()
            # Who goes first alternates too. The first round warms both up.
            pair = (run(ours), run(theirs)) if number % 2 else tuple(reversed((run(theirs), run(ours))))
            if number:
                speeds.append((pair[0], pair[1]))
        table[name] = {
            "ours_tokens_per_s": statistics.median(a for a, _ in speeds),
            "generate_tokens_per_s": statistics.median(b for _, b in speeds),
            "ratio": statistics.median(a / b for a, b in speeds),
            "ratio_min_max": [min(a / b for a, b in speeds), max(a / b for a, b in speeds)],
            "target": TARGETS[name],
        }
        print(name, table[name], flush=True)
    return table


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    threads = os.cpu_count() or 1
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "llama-88m", seed=options.seed)
        config = SupervisorConfig(
            model=str(model), dtype=options.dtype, port=0, threads=threads, device_kv_bytes=2**29, host_kv_bytes=2**28
        )
        theirs = Theirs(model, options.dtype)
        with running(config) as cell:
            table = compare(Ours(cell.base_url), theirs, rounds=options.rounds, seed=options.seed)
    results = {"dtype": options.dtype, "threads": threads, "rounds": options.rounds, "cases": table}
    print(results_file.write(f"serving_vs_generate_{options.dtype}", results, seed=options.seed))


if __name__ == "__main__":
    main()
