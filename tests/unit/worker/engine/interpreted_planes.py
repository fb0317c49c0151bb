"""Steps of models whose layers are not alike by the kernels for GPUs, and by the attention of CPUs; called in the
interpreter.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from services.worker.engine.cuda_graphs import DecodeGraphs
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.kv.device_pool import DevicePool
from services.worker.proving.parts import ATTENTION
from services.worker.proving.table import Attempt, Proof, ProofTable
from tests.cuda.played_capture import PlayedCapture
from tests.engine_driver import Request, page_tables, random_prompt, run_step
from tests.run_name import shm_prefix

STEPS = (
    ((0, 40), (1, 9)),
    ((1, 28), (0, 1)),
    ((0, 1), (2, 17), (1, 1)),
    ((0, 1), (1, 1), (2, 1)),
    ((0, 3), (1, 1), (2, 20)),
)
"""(request, rows) of each step: prompts in chunks, short and long, beside rows that decode."""

LENGTHS = (46, 40, 38)


def load(directory: Path, page_size: int, tokens: int) -> ModelRunner:
    """A runner on a CPU."""
    return ModelRunner.load(
        directory, dtype="float32", device="cpu", page_size=page_size, device_kv_bytes=None, pages=tokens // page_size,
        threads=1, shm_prefix=shm_prefix("planes"),
    )  # fmt: skip


def as_on_gpu(runner: ModelRunner, way: str) -> ModelRunner:
    """A runner over the same model and an empty pool like that of ``runner``, which attends as one on a GPU does."""
    pool, planes = runner.pool, runner.pool.planes
    storage = torch.zeros(pool.tensor.nbytes, dtype=torch.uint8)
    other = DevicePool(pool.geometry, pool.pages, storage, planes=planes)
    proofs = ProofTable(proofs=(Proof(part=ATTENTION, way=way, attempts=(Attempt(way=way),)),))
    other.device = torch.device("cuda:0")
    made = ModelRunner(runner.model, other, vocab_size=runner.vocab_size, proofs=proofs)
    other.device = torch.device("cpu")
    made.states, made._slots = runner.states, runner.slots
    return made


def logits(directory: Path, page_size: int, way: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Of the last row of each request of every step, by the kernels of this name and on a CPU; and last the pools."""
    with torch.inference_mode():
        runner = load(directory, page_size, 256)
        found = []
        for each in (as_on_gpu(runner, way), runner):
            each.pool.tensor.zero_()
            tables = page_tables(each, list(LENGTHS), seed=4)
            requests = [
                Request(random_prompt(length, seed=length), table, slot=slot)
                for slot, (length, table) in enumerate(zip(LENGTHS, tables, strict=True))
            ]
            made = [run_step(each, [(requests[number], rows) for number, rows in step]).numpy() for step in STEPS]
            found.append([*made, each.pool.tensor.numpy().copy()])
        runner.close()
    return found[0], found[1]


def captured(directory: Path, lengths: list[int]) -> tuple[str, np.ndarray, np.ndarray, float]:
    """Why there are no graphs, the logits of a decode step by one and by an ordinary step, and the largest difference
    between what they leave in the pool.
    """
    from services.worker import kernels

    with torch.inference_mode():
        runner = load(directory, 16, 128)
        made = as_on_gpu(runner, "triton")
        graphs = DecodeGraphs(made, 2, capture=PlayedCapture(), kernels=kernels)
        tables = page_tables(made, [length + 1 for length in lengths], seed=2)
        for number, (length, table) in enumerate(zip(lengths, tables, strict=True)):
            run_step(made, [(Request(random_prompt(length, seed=number), table), length)])
        segments = [Segment(1, length, table) for length, table in zip(lengths, tables, strict=True)]
        meta = ForwardMeta.build(segments, 16, "cpu")
        given = torch.tensor(random_prompt(len(lengths), seed=9)), torch.tensor(lengths)
        last_rows = torch.arange(len(lengths))
        expected = made.run(*given, made.paged_step(meta), last_rows)
        written = made.pool.tensor.clone()
        for length, table in zip(lengths, tables, strict=True):
            made.pool.tensor[:, :, table[length // 16], length % 16] = 0
        found = graphs.replay(*given, meta, last_rows)
        difference = float((made.pool.tensor - written).abs().max())
        runner.close()
    return graphs.fault, np.empty(0) if found is None else found.numpy(), expected.numpy(), difference
