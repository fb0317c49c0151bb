"""Terms of adapters as the kernels read them: merged and in strips, like the matrices that they are added to."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from services.worker.engine.adapters import Adapter, AdapterRows, LowRankWeights
from services.worker.engine.fused.model import FusedModel, MergedLayer
from services.worker.native.fused import LANES, TERMS, LowRankStruct, StepStruct


class StepTerms:
    """The terms of one step's adapters. Pointers that :meth:`tell` sets are valid as long as this object lives."""

    def __init__(self, rows: int, adapted: Sequence[AdapterRows], terms: Sequence[_AdapterTerms]) -> None:
        """Join the adapters' ``terms``, in the order of ``adapted``."""
        self._of_row = torch.full((rows,), -1, dtype=torch.int32)
        for place, part in enumerate(adapted):
            self._of_row[part.rows] = place
        self._terms = terms
        self._pointers = (ctypes.c_void_p * len(terms))(*(ctypes.addressof(each.structs) for each in terms))
        self._most_ranks = max(each.most_ranks for each in terms)

    def tell(self, step: StepStruct, rows: torch.Tensor | None = None) -> None:
        """Have ``step`` add these terms. ``rows`` int64 [K]: the rows that it still has, if not all."""
        if rows is not None:
            self._of_row = self._of_row[rows]
        step.adapters, step.adapted = self._of_row.data_ptr(), ctypes.addressof(self._pointers)
        step.most_ranks = self._most_ranks


class FusedTerms:
    """The terms of one model's adapters, made once for each and kept as long as the adapter is."""

    def __init__(self, model: FusedModel) -> None:
        """Begin with no adapters; ``model`` tells where each linear layer lies in the merged matrices."""
        self._model = model
        self._made: WeakKeyDictionary[Adapter, _AdapterTerms] = WeakKeyDictionary()

    def of_step(self, rows: int, adapted: Sequence[AdapterRows]) -> StepTerms | None:
        """Return the terms of a step of ``rows`` rows; None where no row has an adapter."""
        if not adapted:
            return None
        return StepTerms(rows, adapted, [self._terms(part.adapter) for part in adapted])

    def _terms(self, adapter: Adapter) -> _AdapterTerms:
        made = self._made.get(adapter)
        if made is None:
            made = self._made[adapter] = _AdapterTerms(self._model, adapter.weights)
        return made


class _AdapterTerms:
    """The terms of one adapter: ``structs`` has an entry for each of TERMS of every layer."""

    def __init__(self, model: FusedModel, weights: Mapping[str, LowRankWeights]) -> None:
        self._kept: list[torch.Tensor] = []  # Keeps the structures' targets alive.
        self.structs = (LowRankStruct * (len(TERMS) * len(model.merged)))()
        self.most_ranks = LANES
        for number, layer in enumerate(model.merged):
            for place, term in enumerate(TERMS):
                self._take(self.structs[number * len(TERMS) + place], layer[term], weights)

    def _take(self, struct: Any, merged: MergedLayer, weights: Mapping[str, LowRankWeights]) -> None:
        """Make one matrix of all ranks of the parts, and one of all outputs, zero where a part lacks a rank."""
        found = [(part, weights[part.name]) for part in merged.parts if part.name in weights]
        ranks = -(-sum(len(each.a) for _, each in found) // LANES) * LANES
        if not ranks:
            return
        a = torch.zeros(ranks, merged.inputs)
        b = torch.zeros(merged.outputs, ranks)
        first = 0
        for part, each in found:
            until = first + len(each.a)
            a[first:until] = each.a
            b[part.first : part.first + len(each.b), first:until] = each.b * each.scale
            first = until
        struct.a, struct.b, struct.ranks = self._strips(a), self._strips(b), ranks
        self.most_ranks = max(self.most_ranks, ranks)

    def _strips(self, matrix: torch.Tensor) -> int:
        """Return matrix [n * LANES, k] as [n, k, LANES]."""
        strips = matrix.view(len(matrix) // LANES, LANES, -1).transpose(1, 2).contiguous()
        self._kept.append(strips)
        return strips.data_ptr()
