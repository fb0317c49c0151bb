"""The proof of ``--exact`` on the device, before any request is served.

A model must meet two conditions. It may call only operators of torch that compute each row, or each number, by itself,
or that were replaced by ours, so that shapes that were not tried hold no surprise. And the same prompt must have the
same bits, logits and KV, in every way that is tried: whole, beside others, in chunks, token by token, among decodes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.engine.forward_meta import ForwardMeta, Segment, pages_for
from services.worker.kv.device_pool import DevicePool
from shared import progress
from shared.errors import ConfigError, UnsupportedModel
from shared.logs import get_logger

Forward = Callable[[torch.Tensor, torch.Tensor, ForwardMeta, torch.Tensor], torch.Tensor]

MOVING = frozenset({
    "_local_scalar_dense", "_pin_memory", "_reshape_alias", "_to_copy", "_unsafe_view", "arange", "cat", "clone",
    "constant_pad_nd", "copy", "detach", "embedding", "empty", "empty_like", "empty_strided", "fill", "flip",
    "full", "full_like", "gather", "index", "index_copy", "index_select", "is_pinned", "lift_fresh", "masked_fill",
    "new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "pin_memory", "repeat", "roll",
    "scalar_tensor", "set", "tril", "triu", "view", "where", "zero", "zeros", "zeros_like",
})  # fmt: skip
"""Operators, without the _ of in-place forms, that move or create numbers. Views and operators that compute each number
by itself are recognised by torch's own marks.
"""

_TRIED_TOKENS = 1100
"""Longer than a split of the keys, so that splits are merged in some ways and not in others."""

_LOOKED_AT = 8
"""Number of rows whose logits are compared, and of decodes in a batch."""


def replaced_operators(key: str) -> Any:
    """Replace torch's operators by kernels whose results do not depend on the batch.

    They are replaced in this process and on tensors of a dispatch key such as ``CUDA``, as long as the result lives.
    """
    return _aten().replace_operators(key)


def prove_exact(forward: Forward, pool: DevicePool, vocab_size: int, max_context: int) -> None:
    """Raise UnsupportedModel, with the reason, where a model on this device is not exact; overwrites the pool."""
    with progress.phase("proving exact mode"):
        trial = Trial(forward, pool, vocab_size, max_context)
        trial.observe(_aten().REPLACED)
        trial.run()
    get_logger("worker.engine").info("exact_mode_proven", tokens=trial.tokens)


def _aten() -> Any:
    # Imported here because it pulls in Triton, which machines without a GPU need not have.
    return importlib.import_module("services.worker.kernels.exact.aten")


class ObservedOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A record of the operators called within it that may depend on the batch, in ``unknown``."""

    def __init__(self, replaced: Iterable[str]) -> None:
        """Ignore operators in ``MOVING`` and ``replaced``, and the overload in a name such as ``mean.dim``."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = MOVING | {name.partition(".")[0] for name in replaced}
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and return its result; add its name to ``unknown`` if it may depend on the batch."""
        name = func.name().removeprefix("aten::").partition(".")[0].rstrip("_") or func.name()
        if name not in self._known:
            # Some operators are only names for others, which are then looked at.
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
            if not func.is_view and torch.Tag.pointwise not in func.tags:
                self.unknown.add(func.name())
        return func(*args, **(kwargs or {}))


class Trial:
    """One prompt over a pool, computed in several ways; it overwrites the pool."""

    def __init__(self, forward: Forward, pool: DevicePool, vocab_size: int, max_context: int) -> None:
        """Plan the trial. Raises ConfigError for a pool too small to try anything in."""
        self._forward, self._pool, self._vocab_size = forward, pool, vocab_size
        size = pool.geometry.page_size
        self._tokens = min(_TRIED_TOKENS, max_context, pool.pages // 2 * size)
        if self._tokens < 2:
            raise ConfigError(f"a device pool of {pool.pages} pages is too small to try --exact in")
        count = pages_for(self._tokens, size)
        order = np.arange(2 * count - 1, -1, -1, dtype=np.int32)
        self._tables = order[:count], order[count:]
        ids = torch.arange(2 * self._tokens) * 7919 % vocab_size
        self._ids = ids[: self._tokens], ids[self._tokens :]
        last, looked_at = self._tokens - 1, min(_LOOKED_AT, self._tokens)
        self._rows = sorted({last * number // max(1, looked_at - 1) for number in range(looked_at)})
        self._expected = torch.empty(0)
        self._kv = torch.empty(0)

    @property
    def tokens(self) -> int:
        """Length of the prompt that is tried."""
        return self._tokens

    def observe(self, replaced: Iterable[str]) -> None:
        """Run a prefill and a decode step. Raises UnsupportedModel for operators that may depend on the batch."""
        observed = ObservedOperators(replaced)
        with observed:
            self._step((0, 0, self._tokens))
            self._step((0, self._tokens - 1, self._tokens))
        if observed.unknown:
            raise UnsupportedModel(
                f"--exact: the model calls {', '.join(sorted(observed.unknown))}, whose results may depend on the batch"
            )

    def run(self) -> None:
        """Raise UnsupportedModel, naming the first way by which a row has other bits than in the whole prompt."""
        end = self._tokens
        self._expected = self._step((0, 0, end), rows=self._rows)
        self._kv = self._held()
        self._compare("beside another prompt", (0, end), [(1, 0, max(1, end // 2)), (0, 0, end)])
        middle = max(1, end // 29)
        for first, last in ((0, middle), (middle, max(middle, end - 1)), (max(middle, end - 1), end)):
            if first < last:
                self._compare("in chunks", (first, last), [(0, first, last)])
        others = [(1, row, row + 1) for row in self._rows]
        for row in self._rows:
            self._compare("token by token", (row, row + 1), [(0, row, row + 1)])
            self._compare("in a batch of decodes", (row, row + 1), [*others, (0, row, row + 1)])
        self._compare("beside a chunk", (end - 1, end), [(1, 0, max(1, end // 2)), (0, end - 1, end)])

    def _compare(self, how: str, span: tuple[int, int], segments: list[tuple[int, int, int]]) -> None:
        """Raise UnsupportedModel if the last segment, the part ``span`` of the prompt, has other logits or KV."""
        before = sum(last - first for _, first, last in segments[:-1])
        inside = [row for row in self._rows if span[0] <= row < span[1]]
        found = self._step(*segments, rows=[before + row - span[0] for row in inside])
        numbers = [self._rows.index(row) for row in inside]
        if not torch.equal(found, self._expected[numbers]) or not torch.equal(self._held(), self._kv):
            raise UnsupportedModel(
                f"--exact: a prompt of {self._tokens} tokens has other bits {how} than computed whole and alone"
            )

    def _step(self, *segments: tuple[int, int, int], rows: Sequence[int] = (0,)) -> torch.Tensor:
        """Return the logits of ``rows`` of the batch of segments: prompt, first token, end."""
        given = [Segment(last - first, first, self._tables[prompt]) for prompt, first, last in segments]
        meta = ForwardMeta.build(given, self._pool.geometry.page_size, self._pool.device)
        ids = torch.cat([self._ids[prompt][first:last] for prompt, first, last in segments])
        positions = torch.cat([torch.arange(first, last) for _, first, last in segments])
        return self._forward(ids, positions, meta, torch.tensor(rows, dtype=torch.int64)).cpu()

    def _held(self) -> torch.Tensor:
        """Return the prompt's KV, as bits, in host memory: once its pool is made, a device has little room."""
        pages = self._pool.tensor[:, :, torch.from_numpy(self._tables[0]).long().to(self._pool.device)].cpu()
        bits = torch.int16 if pages.element_size() == 2 else torch.int32
        return pages.flatten(2, 3)[:, :, : self._tokens].contiguous().view(bits)
