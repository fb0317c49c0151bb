"""A prefix computed by a real runner, and questions about it asked with all of it and with what matters."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bench.stored_prefix import StoredPrefix
from services.worker.engine.cpu_attention import CpuAttention
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.model_runner import ModelRunner
from services.worker.importance.importance_step import ImportanceStep
from services.worker.importance.important_prefix import ImportantPrefix
from services.worker.importance.prefix_source import token_slots
from tests.engine_driver import Request, page_tables, random_prompt, run_step


class Asked:
    """``prefix`` tokens whose KV is in the runner's pool, and ``question`` more that are not computed yet."""

    def __init__(self, runner: ModelRunner, prefix: int, question: int, seed: int = 1) -> None:
        self.runner, self.prefix = runner, prefix
        (self.pages,) = page_tables(runner, [prefix + question + 16], seed=seed)
        self.tokens = random_prompt(prefix + question, seed)
        run_step(runner, [(Request(self.tokens[:prefix], self.pages), prefix)])

    def stored(self, probe_heads: tuple[int, ...] = (), start: int = 0) -> StoredPrefix:
        """A copy of the prefix's KV from token ``start`` on, outside of the pool."""
        slots = self._slots(start)
        return StoredPrefix(self.runner.pool.tensor.flatten(2, 3)[:, :, slots].clone(), probe_heads, start)

    def forget(self, start: int = 0) -> None:
        """Overwrite the prefix from token ``start`` on in the pool with what would poison every answer."""
        self.runner.pool.tensor.flatten(2, 3)[:, :, self._slots(start)] = float("nan")

    def _slots(self, start: int) -> torch.Tensor:
        return torch.from_numpy(token_slots(self.pages, self.runner.geometry.page_size, start, self.prefix))

    def meta(self, start: int, end: int) -> ForwardMeta:
        """A step of tokens ``[start, end)``."""
        return ForwardMeta.build([Segment(end - start, start, self.pages)], self.runner.geometry.page_size, "cpu")

    def full(self, start: int, end: int) -> torch.Tensor:
        """Logits of all rows with all of the prefix."""
        return self._forward(start, end, None)

    def sparse(self, start: int, end: int, prefix: ImportantPrefix) -> torch.Tensor:
        """Logits of all rows with what ``prefix`` chooses."""
        return self._forward(start, end, {0: prefix})

    def _forward(self, start: int, end: int, prefixes: Mapping[int, ImportantPrefix] | None) -> torch.Tensor:
        ids, positions = torch.tensor(self.tokens[start:end]), torch.arange(start, end)
        meta, rows = self.meta(start, end), torch.arange(end - start)
        if prefixes is None:
            return self.runner.forward(ids, positions, meta, rows)
        step = ImportanceStep(meta, self.runner.pool, CpuAttention(self.runner.pool), prefixes)
        return self.runner.run(ids, positions, step, rows)
