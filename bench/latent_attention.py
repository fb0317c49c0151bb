"""Both forms of attention to latents on a CPU: absorbed, in the latent space, and over expanded K and V.

One layer of multi-head latent attention of DeepSeek V2 Lite's sizes (16 heads, latents of 512 + 64 values, K of
128 + 64 and V of 128), pages of 16 tokens in random order. ``chosen`` is the form that serves; of single rows,
``by_decode_ms`` is the absorbed form by the kernel for decoding. Times are the processor's, of one thread, and taken in
turns: what else a machine does falls on each.

``python -m bench.latent_attention [--rounds 9]``
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from bench import results_file
from services.worker.engine.attention import AttentionCall
from services.worker.engine.cpu_attention import CpuAttention
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.latent_attention import LatentAttention
from services.worker.engine.latents import Latents
from services.worker.kv.device_pool import DTYPE_NAMES, DevicePool
from services.worker.kv.planes import LatentsKept, map_planes

HEADS, PAGE_SIZE = 16, 16
CASES = ((1, 512), (1, 2048), (1, 8192), (16, 2048), (64, 2048), (128, 2048), (256, 2048), (512, 2048), (512, 0))
FORMS = {"absorbed": math.inf, "expanded": 0.0}


def latents_of(dtype: torch.dtype) -> Latents:
    """One random layer."""
    config = DeepseekV3Config(num_attention_heads=HEADS, num_key_value_heads=HEADS, hidden_size=2048, q_lora_rank=None)
    module = DeepseekV3Attention(config, 0).to(dtype).requires_grad_(False)
    return Latents(module)


def compare(latents: Latents, rows: int, context: int, dtype: torch.dtype, rounds: int, seed: int) -> dict[str, Any]:
    """Median processor milliseconds of both forms for ``rows`` tokens after ``context`` others."""
    generator = torch.Generator().manual_seed(seed)
    planes = map_planes([LatentsKept(latents.rank, latents.rope)], PAGE_SIZE, DTYPE_NAMES[dtype])
    pages = -(-(rows + context) // PAGE_SIZE)
    pool = DevicePool.create(planes.geometry, pages, device="cpu", shm_prefix="bench", planes=planes)
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=generator))
    table = np.random.default_rng(seed).permutation(pages).astype(np.int32)
    meta = ForwardMeta.build([Segment(rows, context, table)], PAGE_SIZE, "cpu")
    dim = latents.nope + latents.rope
    query = torch.randn(1, HEADS, rows, dim, generator=generator).to(dtype)
    row = torch.empty(1, 1, rows, latents.rank + latents.rope, dtype=dtype)
    call = AttentionCall(0, query, row, row[..., : latents.rank], dim**-0.5, None, None, {}, latents=latents)
    serving = LatentAttention(pool, CpuAttention(pool, packs_single_rows=True), CpuAttention)
    ways = {form: (serving, most) for form, most in FORMS.items()}
    if rows == 1:
        ways["by_decode"] = LatentAttention(pool, CpuAttention(pool), CpuAttention), math.inf
    times: dict[str, list[float]] = {way: [] for way in ways}
    found: dict[str, torch.Tensor] = {}
    for _ in range(rounds + 1):  # The first warms up.
        for way, (backend, most) in ways.items():
            with mock.patch.object(Latents, "absorbed_rows", most):
                started = time.process_time()
                found[way] = backend.for_step(meta)(call)
                times[way].append(time.process_time() - started)
    for each in found.values():
        torch.testing.assert_close(found["absorbed"], each, atol=0.03, rtol=0.03)
    pool.close()
    figures: dict[str, Any] = {"rows": rows, "context": context}
    figures |= {f"{way}_ms": statistics.median(values[1:]) * 1e3 for way, values in times.items()}
    pairs = zip(times["expanded"][1:], times["absorbed"][1:], strict=True)
    figures["absorbed_faster_by"] = statistics.median(before / after for before, after in pairs)
    figures["chosen"] = "absorbed" if rows <= latents.absorbed_rows else "expanded"
    return figures


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"rounds": options.rounds, "by_dtype": {}}
    for dtype in (torch.float32, torch.bfloat16):
        latents, cases = latents_of(dtype), []
        for rows, context in CASES:
            cases.append(compare(latents, rows, context, dtype, options.rounds, options.seed))
            print(DTYPE_NAMES[dtype], cases[-1], flush=True)
        results["by_dtype"][DTYPE_NAMES[dtype]] = cases
    print(results_file.write("latent_attention", results, seed=options.seed))


if __name__ == "__main__":
    main()
