"""A bundled model that is asked about one prefix at a time: with all of it, with what matters of it, or watched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from bench.importance_prompts import Prefix
from bench.stored_prefix import StoredPrefix
from services.worker.engine.attention import AttentionCall, AttentionStep
from services.worker.engine.cpu_attention import CpuAttention
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.importance.identification import ProbeUnit, Rows, head_units, measure_importance
from services.worker.importance.importance_step import ImportanceStep
from services.worker.importance.important_prefix import ImportantPrefix
from services.worker.importance.metrics import METRICS
from services.worker.importance.prefix_source import token_slots

PAGE_SIZE = 16
ANSWER_TOKENS = 16
COMPARED_METRICS = ("h2o", "last_pooled")
"""The paper's and one that suits these models: they are looked at more closely than the others."""


class Asker:
    """A model with one prefix at a time in its pool."""

    def __init__(self, model_dir: Path, tokens: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.runner = ModelRunner.load(
            model_dir,
            dtype="float32",
            device="cpu",
            page_size=PAGE_SIZE,
            device_kv_bytes=None,
            pages=-(-tokens // PAGE_SIZE),
            threads=1,
            shm_prefix="bench-importance",
        )
        self.pages = np.arange(self.runner.pool.pages, dtype=np.int32)
        self.backend = CpuAttention(self.runner.pool)

    def take(self, prefix: Prefix) -> StoredPrefix:
        """Compute the prefix, and return a copy of its KV with the first three heads' keys apart."""
        self.step(prefix.tokens, 0)
        slots = torch.from_numpy(token_slots(self.pages, PAGE_SIZE, 0, len(prefix.tokens)))
        kv = self.runner.pool.tensor.flatten(2, 3)[:, :, slots].clone()
        return StoredPrefix(kv, range(min(3, self.runner.geometry.kv_heads)))

    def step(self, ids: Sequence[int], context: int, prefix: ImportantPrefix | None = None) -> int:
        """The next token by greedy choice."""
        meta = self.meta(len(ids), context)
        step: AttentionStep = self.runner.paged_step(meta)
        if prefix is not None:
            step = ImportanceStep(meta, self.runner.pool, self.backend, {0: prefix})
        return int(self.run(ids, context, step).argmax())

    def run(self, ids: Sequence[int], context: int, step: AttentionStep) -> torch.Tensor:
        positions = torch.arange(context, context + len(ids))
        return self.runner.run(torch.tensor(ids), positions, step, torch.tensor([len(ids) - 1]))

    def meta(self, rows: int, context: int) -> ForwardMeta:
        return ForwardMeta.build([Segment(rows, context, self.pages)], PAGE_SIZE, "cpu")

    def answer(self, question: list[int], context: int, prefix: ImportantPrefix | None = None) -> str:
        """The greedy answer to a question whose prefix is ``context`` tokens long."""
        reply: list[int] = []
        ids = question
        while len(reply) < ANSWER_TOKENS:
            token = self.step(ids, context, prefix)
            if token in self.runner.eos_token_ids:
                break
            reply.append(token)
            context, ids = context + len(ids), [token]
        return str(self.tokenizer.decode(reply, skip_special_tokens=True)).strip()


class Watching:
    """An attention step that computes as ever and notes how important the prefix is to every head.

    ``importance[metric][layer]`` is float32 ``[kv_heads, prefix]``; ``paid[layer]``, ``[heads, prefix]``, is the
    attention that each query head pays.
    """

    def __init__(self, asker: Asker, rows: int, prefix: int) -> None:
        self._asker, self._prefix = asker, prefix
        self._step = asker.runner.paged_step(asker.meta(rows, prefix))
        self._slots = torch.from_numpy(token_slots(asker.pages, PAGE_SIZE, 0, prefix + rows))
        self.importance: dict[str, list[torch.Tensor]] = {name: [] for name in METRICS}
        self.paid: list[torch.Tensor] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        output = self._step.attend(call)
        heads = call.query.shape[1]
        keys = self._asker.runner.pool.k(call.layer).flatten(0, 1)[self._slots].transpose(0, 1)
        rows = Rows(call.query[0], self._prefix, call.scaling, call.window, call.softcap)
        positions = torch.arange(keys.shape[1])
        units = head_units(heads, len(keys))
        for name, metric in METRICS.items():
            self.importance[name].append(measure_importance(rows, keys, positions, self._prefix, units, metric))
        single = tuple(ProbeUnit(head, head + 1, head * len(keys) // heads) for head in range(heads))
        each = keys[[unit.kv_head for unit in single]]
        self.paid.append(measure_importance(rows, each, positions, self._prefix, single, METRICS["h2o"]))
        return output
