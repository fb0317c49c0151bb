"""A model as the kernels see it: merged matrices, norms and biases of every layer. Making it takes the weights over."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.worker.engine.fused.coded_strips import CodedMemory, coded_bytes, mergeable
from services.worker.engine.fused.family import Family, LayerModules
from services.worker.engine.fused.strips import StripEmbedding, StripLinear, StripMemory, StripNorm
from services.worker.native.fused import FusedKernels, LayerStruct, Matrix, ShapeStruct

MERGED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Linear layers that are merged into one matrix, by its name in ``layer_t``: the first two belong to attention, the
others to the MLP.
"""


@dataclass(frozen=True, slots=True)
class MergedPart:
    """A linear layer of the model, by its name there, as outputs of a merged matrix from ``first`` on."""

    name: str
    first: int


@dataclass(frozen=True, slots=True)
class MergedLayer:
    """A merged matrix [outputs, inputs]."""

    parts: tuple[MergedPart, ...]
    inputs: int
    outputs: int


class FusedModel:
    """The weights of one model as a step reads them. ``layers``, ``head`` and ``shape`` are addresses of structures."""

    def __init__(self, model: Any, family: Family, kernels: FusedKernels) -> None:
        """Put modules that compute with strips in place of ``model``'s own; their weights are released layer by layer.

        Nothing of ``family`` but its layers may be used afterwards.
        """
        self.query_heads, self.kv_heads, self.head_dim = family.query_heads, family.kv_heads, family.head_dim
        self.hidden, self.vocabulary, self.scaling = family.hidden, family.vocabulary, family.scaling
        self.inputs, self.intermediate = _most_inputs(family), family.intermediate
        self.rotary = family.rotary
        self.windows = [layer.window for layer in family.layers]
        self.attention = [layer.attention for layer in family.layers]
        self._kernels = kernels
        self._kept: list[object] = []  # Keeps the structures' targets alive.
        self._shape = ShapeStruct(
            family.hidden, family.query_heads, family.kv_heads, family.head_dim, family.intermediate, family.eps
        )
        memory = _Memory(family)
        # Before any module is released, whose id another may get.
        self.merged = _merged_layers(model, family)
        self._structs = (LayerStruct * len(family.layers))()
        for struct, layer in zip(self._structs, family.layers, strict=True):
            self._take_attention(struct, layer, memory)
            self._take_mlp(struct, layer, memory)
            self._take_norms(struct, layer, family.eps)
        self.layers = [ctypes.addressof(struct) for struct in self._structs]  # One behind the other.
        self._head = memory.pack([family.head])
        self.weight_numbers, self.code_bytes = memory.elements.numbers, memory.code_bytes
        self._final_norm = family.final_norm.weight.detach()
        if family.is_tied:
            model.set_input_embeddings(StripEmbedding(kernels, self._head, self.vocabulary))
        model.set_output_embeddings(StripLinear(kernels, self._head, outputs=self.vocabulary))
        self.embedding = model.get_input_embeddings()

    @property
    def shape(self) -> int:
        """Address of the model's ``ShapeStruct``, valid as long as this object lives."""
        return ctypes.addressof(self._shape)

    @property
    def head(self) -> int:
        """Address of the matrix structure of the head, which gives the logits."""
        return ctypes.addressof(self._head.struct)

    @property
    def final_norm(self) -> int:
        """Address of the weights of the norm before the head."""
        return self._final_norm.data_ptr()

    def _take_attention(self, struct: LayerStruct, layer: LayerModules, memory: _Memory) -> None:
        struct.qkv, struct.qkv_bias = self._merge(layer.attention, MERGED["qkv"], memory)
        struct.out, struct.out_bias = self._merge(layer.attention, MERGED["out"], memory)

    def _take_mlp(self, struct: LayerStruct, layer: LayerModules, memory: _Memory) -> None:
        struct.gate_up, struct.gate_up_bias = self._merge(layer.mlp, MERGED["gate_up"], memory)
        struct.down, struct.down_bias = self._merge(layer.mlp, MERGED["down"], memory)

    def _take_norms(self, struct: LayerStruct, layer: LayerModules, eps: float) -> None:
        struct.input_norm = self._keep(layer.input_norm.weight)
        struct.post_norm = self._keep(layer.post_norm.weight)
        for kind in ("q_norm", "k_norm"):
            norm = getattr(layer.attention, kind, None)
            if norm is not None:
                setattr(struct, kind, self._keep(norm.weight))
                setattr(layer.attention, kind, StripNorm(self._kernels, norm.weight.detach(), eps))

    def _merge(self, parent: Any, names: tuple[str, ...], memory: _Memory) -> tuple[Any, int | None]:
        """Make one matrix and one bias of linear layers of ``parent``, and put parts of it in their place."""
        modules = [getattr(parent, name) for name in names]
        matrix = memory.pack(modules)
        self._kept.append(matrix)
        bias: torch.Tensor | None = None
        if any(module.bias is not None for module in modules):
            bias = torch.cat([_bias_of(module) for module in modules])
        first = 0
        for name, module in zip(names, modules, strict=True):
            outputs = module.out_features
            part = None if bias is None else bias[first : first + outputs]
            setattr(parent, name, StripLinear(self._kernels, matrix.part(first, outputs), part))
            first += outputs
        return matrix.struct, None if bias is None else self._keep(bias)

    def _keep(self, tensor: torch.Tensor) -> int:
        tensor = tensor.detach().contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def _merged_layers(model: Any, family: Family) -> list[dict[str, MergedLayer]]:
    """Return the merged matrices of every layer, by the keys of MERGED."""
    names = {id(module): name for name, module in model.named_modules()}
    found: list[dict[str, MergedLayer]] = []
    for layer in family.layers:
        found.append({})
        for merged, modules in _merged_modules(layer):
            ends = list(itertools.accumulate(module.out_features for module in modules))
            firsts = (0, *ends[:-1])
            parts = (MergedPart(names[id(module)], first) for module, first in zip(modules, firsts, strict=True))
            found[-1][merged] = MergedLayer(tuple(parts), modules[0].in_features, ends[-1])
    return found


class _Memory:
    """Memory for all matrices of a model, of elements and of codes."""

    def __init__(self, family: Family) -> None:
        plain: list[tuple[int, int]] = []
        self.code_bytes = 0
        for modules in _merged(family):
            codes = mergeable(modules)
            if codes is None:
                plain += [(module.out_features, module.in_features) for module in modules]
            else:
                self.code_bytes += coded_bytes(codes)
        self.elements = StripMemory(plain, family.dtype)
        self._codes = CodedMemory(self.code_bytes, family.dtype)

    def pack(self, modules: Sequence[Any]) -> Matrix:
        """Pack linear ``modules`` into one matrix."""
        codes = mergeable(modules)
        if codes is None:
            return self.elements.pack([module.weight.detach() for module in modules])
        return self._codes.pack(codes)


def _merged(family: Family) -> Iterator[list[Any]]:
    """Yield the linear layers of each matrix of the model."""
    for layer in family.layers:
        yield from (modules for _, modules in _merged_modules(layer))
    yield [family.head]


def _merged_modules(layer: LayerModules) -> Iterator[tuple[str, list[Any]]]:
    """Yield the linear layers of every matrix of a layer, by the keys of MERGED."""
    for merged, children in MERGED.items():
        parent = layer.attention if merged in ("qkv", "out") else layer.mlp
        yield merged, [getattr(parent, child) for child in children]


def _bias_of(module: Any) -> torch.Tensor:
    """Return the bias of a linear module; zeros where it has none."""
    bias: torch.Tensor = module.weight.new_zeros(module.out_features) if module.bias is None else module.bias.detach()
    return bias


def _most_inputs(family: Family) -> int:
    """Return the largest number of inputs of any linear layer."""
    return max(family.hidden, family.intermediate, family.query_heads * family.head_dim)
