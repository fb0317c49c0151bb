"""The same seeded workload run for real and simulated with the ``cpu-2core`` profile: hit ratio and TTFT compared.

For real: ``thermocline up`` as its own processes on this machine, one worker, asked over HTTP by as many clients as
requests may be in flight; TTFT is what a client sees. Simulated: ``thermocline simulate`` of the same requests. The
profile is not fitted to these runs. Three cases: one request at a time, several at a time with pools that hold
everything, and several with pools so small that prefixes go to host memory and come back.

``python -m bench.simulator_validation [--queries 120] [--model thermocline-mha | llama-88m]``
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench import results_file
from bench.make_model import make_model
from shared.messages.cell_events import CellConfig
from thermocline.client import Answer, served_model, stream_answer
from thermocline.client.figures import quantile
from thermocline.simulate.profiles import ModelProfile, load_hardware, load_model
from thermocline.simulate.simulation import Setup, Simulation
from thermocline.simulate.tokens import span_tokens
from thermocline.simulate.workloads import Asked
from thermocline.simulate.workloads.documents import DocumentOptions, DocumentWorkload
from thermocline.supervisor.api import running
from thermocline.supervisor.config import SupervisorConfig

PAGE_SIZE = 16
FIRST_ORDINARY_TOKEN = 8
PROMPT_TOKENS, ANSWER_TOKENS, CONTEXTS = 900, 16, 16
CASES = {
    # In flight, device tokens, host tokens.
    "one at a time": (1, 32_768, 65_536),
    "four in flight": (4, 32_768, 65_536),
    "four in flight, half fits": (4, 8_192, 65_536),
}


def workload(queries: int, seed: int) -> DocumentWorkload:
    """Questions about 16 documents, shuffled."""
    options = DocumentOptions(
        contexts=CONTEXTS, queries=queries, prompt_tokens=PROMPT_TOKENS, answer_tokens=ANSWER_TOKENS
    )
    return DocumentWorkload(options, seed)


def token_ids(asked: Asked, vocab_size: int) -> list[int]:
    """The prompt with every id brought into the model's vocabulary; prefixes stay shared."""
    ids = np.concatenate([np.frombuffer(span_tokens(span), dtype="<i4") for span in asked.spans])
    listed: list[int] = (ids % (vocab_size - FIRST_ORDINARY_TOKEN) + FIRST_ORDINARY_TOKEN).tolist()
    return listed


def summary(ttft_ms: list[float], device: int, host: int, prompt: int) -> dict[str, float]:
    return {
        "hit_ratio": (device + host) / prompt,
        "device_hit_ratio": device / prompt,
        "host_hit_ratio": host / prompt,
        "ttft_mean_ms": statistics.fmean(ttft_ms),
        "ttft_p50_ms": quantile(ttft_ms, 0.5),
        "ttft_p99_ms": quantile(ttft_ms, 0.99),
    }


async def ask_all(base_url: str, requests: Iterator[Asked], in_flight: int) -> dict[str, float]:
    """Closed loop: each client sends the next request when its last answer is complete."""
    answers: list[Answer] = []
    async with httpx.AsyncClient(base_url=base_url, timeout=600, trust_env=False) as client:
        served = await served_model(client)

        async def one_client() -> None:
            for asked in requests:
                body = {"model": served["id"], "prompt": token_ids(asked, served["vocab_size"]), "temperature": 0}
                body |= {"max_tokens": asked.answer.tokens, "ignore_eos": True, "return_token_ids": True}
                answers.append(await stream_answer(client, "/v1/completions", body))

        warm = {"model": served["id"], "prompt": [9] * PROMPT_TOKENS, "max_tokens": 2, "ignore_eos": True}
        warm |= {"return_token_ids": True, "cache": {"read": False, "write": False}}
        for _ in range(3):
            await stream_answer(client, "/v1/completions", warm)
        await asyncio.gather(*(one_client() for _ in range(in_flight)))
    return summary(
        [answer.ttft_s * 1e3 for answer in answers],
        sum(answer.device_tokens for answer in answers),
        sum(answer.host_tokens for answer in answers),
        sum(answer.prompt_tokens for answer in answers),
    )


def simulated(model: ModelProfile, case: tuple[int, int, int], queries: int, seed: int) -> dict[str, float]:
    in_flight, device_tokens, host_tokens = case
    setup = Setup(
        hardware=load_hardware("cpu-2core"),
        model=model,
        config=CellConfig(),
        page_size=PAGE_SIZE,
        device_tokens=device_tokens,
        host_tokens=host_tokens,
        in_flight=in_flight,
        seed=seed,
    )
    simulation = Simulation(setup, workload(queries, seed))
    simulation.run()
    figures = simulation.figures()
    hits, ttft = figures["hit_tokens"], figures["ttft_ms"]
    tokens = figures["input_tokens"]
    return {
        "hit_ratio": figures["hit_ratio"],
        "device_hit_ratio": hits["device"] / tokens,
        "host_hit_ratio": hits["host"] / tokens,
        **{f"ttft_{part}_ms": ttft[part] for part in ("mean", "p50", "p99")},
    }


def real(model_dir: Path, model: ModelProfile, case: tuple[int, int, int], queries: int, seed: int) -> dict[str, float]:
    in_flight, device_tokens, host_tokens = case
    config = SupervisorConfig(
        model=str(model_dir),
        dtype="float32",
        port=0,
        threads=os.cpu_count() or 1,
        page_size=PAGE_SIZE,
        device_kv_bytes=device_tokens * model.kv_token_bytes,
        # Identities and checksums take a little more than the pages.
        host_kv_bytes=int(host_tokens * model.kv_token_bytes * 1.02),
    )
    with running(config) as cell:
        return asyncio.run(ask_all(cell.base_url, workload(queries, seed).requests(), in_flight))


def errors(model: dict[str, float], machine: dict[str, float]) -> dict[str, float]:
    """Of ratios the difference, of times the relative error."""
    return {
        name: model[name] - value if name.endswith("ratio") else model[name] / value - 1
        for name, value in machine.items()
    }


def show(table: dict[str, Any]) -> None:
    print(f"{'case':<28} {'':>10} {'hits':>7} {'device':>7} {'host':>7} {'TTFT mean':>10} {'p50':>8} {'p99':>8}")
    for case, rows in table.items():
        for who, row in rows.items():
            scale = 100.0 if who == "error" else 1.0
            times = [row[f"ttft_{part}_ms"] * scale for part in ("mean", "p50", "p99")]
            unit = "%" if who == "error" else ""
            ratios = [row[name] for name in ("hit_ratio", "device_hit_ratio", "host_hit_ratio")]
            print(
                f"{case:<28} {who:>10} " + " ".join(f"{ratio:7.3f}" for ratio in ratios) + " "
                f"{times[0]:9.1f}{unit} {times[1]:7.1f}{unit} {times[2]:7.1f}{unit}"
            )


def main() -> None:
    known = results_file.arguments(__doc__, "--seed")
    known.add_argument("--queries", type=int, default=120)
    known.add_argument("--model", choices=("thermocline-mha", "llama-88m"), default="thermocline-mha")
    options = known.parse_args()
    model, table = load_model(options.model), {}
    with tempfile.TemporaryDirectory() as folder:
        if options.model == "llama-88m":
            model_dir = make_model(Path(folder) / "llama-88m", seed=options.seed)
        else:
            model_dir = Path(__file__).parents[1] / "models" / options.model
        for name, case in CASES.items():
            machine = real(model_dir, model, case, options.queries, options.seed)
            virtual = simulated(model, case, options.queries, options.seed)
            table[name] = {"real": machine, "simulated": virtual, "error": errors(virtual, machine)}
            show({name: table[name]})
    results = {"model": options.model, "queries": options.queries, "cases": table}
    print(results_file.write(f"simulator_validation_{options.model}", results, seed=options.seed))


if __name__ == "__main__":
    main()
