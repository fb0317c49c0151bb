"""What the tensors of one quantised layer mean, format by format.

Sources: compressed-tensors 0.20 (``pack_to_int32``, ``QuantizationArgs``); AutoAWQ's layout "gemm"; AutoGPTQ's "gptq"
and "gptq_v2"; fp8 as DeepSeek-V3 stores it, a scale for each block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from services.worker.engine.quantised.codes import SCALE_DTYPES, Codes
from shared.errors import UnsupportedModel
from shared.quantisation import AWQ, COMPRESSED_TENSORS, FP8, GPTQ

Tensors = Mapping[str, torch.Tensor]
"""Those of one layer by the ends of their names, as ``weight_scale``."""

Meaning = Codes | torch.Tensor
"""Codes, or a weight [outputs, inputs] in float32 where it has no such form."""

Settings = Mapping[str, Any]
"""``quantization_config`` of a checkpoint."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of eight codes in 32 bits, from the lowest bits up, belong to neighbouring outputs."""


@dataclass(frozen=True, slots=True)
class _Format:
    """``marks`` tell a quantised layer from others; ``kinds`` are the tensors that it may consist of, and ``optional``
    those that it may have besides.
    """

    marks: frozenset[str]
    kinds: tuple[frozenset[str], ...]
    optional: frozenset[str]
    read: Callable[[Settings, Tensors], Meaning]


def is_quantised(method: str, names: set[str]) -> bool:
    """Whether tensors of these names make a quantised layer."""
    return bool(_FORMATS[method].marks & names)


def read_layer(method: str, settings: Settings, tensors: Tensors) -> Meaning:
    """Read the weight of one layer of a checkpoint that is quantised by ``method`` with these ``settings``.

    Raises UnsupportedModel for tensors that do not fit together, and for any that is not understood.
    """
    form, names = _FORMATS[method], tensors.keys()
    kind = next((each for each in form.kinds if each <= names), None)
    odd = sorted(names - (kind or frozenset()) - form.optional)
    if kind is None or odd:
        raise UnsupportedModel(f"tensors {', '.join(odd)} of a layer are not understood")
    return form.read(settings, tensors)


def _awq(settings: Settings, tensors: Tensors) -> Meaning:
    """Qweight int32 [inputs, outputs / 8], qzeros int32 [groups, outputs / 8], scales [groups, outputs]."""
    codes, zeros = (_awq_columns(_unpacked(tensors[name], 4, along=1)) for name in ("qweight", "qzeros"))
    size = settings.get("group_size", settings.get("q_group_size"))
    return _grouped(4, codes.T - 8, tensors["scales"].T, zeros.T - 8, sizes={size})


def _awq_columns(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(len(codes), -1, 8)[:, :, _AWQ_ORDER].flatten(1)


def _gptq(settings: Settings, tensors: Tensors) -> Meaning:
    """Qweight int32 [inputs * bits / 32, outputs], qzeros int32 [groups, outputs * bits / 32], scales [groups,
    outputs], g_idx int32 [inputs], the group of each input.
    """
    scales, words = tensors["scales"], tensors["qzeros"]
    bits = words.shape[1] * 32 // scales.shape[1]
    if bits not in (4, 8):
        raise UnsupportedModel(f"a layer has codes of {bits} bits")
    codes, zeros = _unpacked(tensors["qweight"], bits, along=0), _unpacked(words, bits, along=1)
    if str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower() == "gptq":
        # Zero points were stored less one, and what reads them differs in what the greatest means: 0 or one more.
        if int(zeros.max()) == (1 << bits) - 1:
            raise UnsupportedModel("a zero point in the layout gptq may be 0 or beyond the greatest code")
        zeros = zeros + 1
    bias = 1 << bits - 1
    sizes = {settings.get("group_size")}
    return _grouped(bits, codes.T - bias, scales.T, zeros.T - bias, sizes=sizes, order=tensors.get("g_idx"))


def _compressed(settings: Settings, tensors: Tensors) -> Meaning:
    """Weight_packed int32 [outputs, inputs * bits / 32] or weight [outputs, inputs] of 8 bits, and weight_scale."""
    weights = [scheme["weights"] for scheme in settings["config_groups"].values()]
    if "weight_packed" in tensors:
        packed, shape = tensors["weight_packed"], tensors["weight_shape"].tolist()
        bits = packed.shape[1] * 32 // int(shape[1])
        if bits not in (4, 8) or packed.shape[0] != shape[0]:
            raise UnsupportedModel(f"a layer of {shape} is packed in words of {list(packed.shape)}")
        values = _unpacked(packed, bits, along=1)[:, : int(shape[1])] - (1 << bits - 1)
    elif tensors["weight"].dtype == torch.int8:
        bits, values = 8, tensors["weight"].int()
    else:
        blocks = {tuple(each["block_structure"]) for each in weights if each.get("block_structure")}
        return _scaled(tensors["weight"], tensors["weight_scale"], blocks.pop() if len(blocks) == 1 else None)
    outputs = len(values)
    zeros = tensors.get("weight_zero_point")
    if zeros is not None and "weight_packed" in tensors:
        zeros = _unpacked(zeros, bits, along=0)[:outputs] - (1 << bits - 1)
    return _grouped(
        bits,
        values,
        _by_output(tensors["weight_scale"], outputs),
        None if zeros is None else _by_output(zeros, outputs).int(),
        sizes={each.get("group_size") for each in weights},
        order=tensors.get("weight_g_idx"),
    )


def _fp8(settings: Settings, tensors: Tensors) -> torch.Tensor:
    """Weight float8 [outputs, inputs], and the scale of the tensor, of outputs or of blocks."""
    scales = tensors["weight_scale_inv"] if "weight_scale_inv" in tensors else tensors["weight_scale"]
    block = settings.get("weight_block_size")
    return _scaled(tensors["weight"], scales, None if block is None else tuple(block))


def _scaled(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, ...] | None) -> torch.Tensor:
    """float32 [outputs, inputs]. The last blocks may be cut."""
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2:
        raise UnsupportedModel(f"a weight of {list(weight.shape)} in {weight.dtype} is not understood")
    outputs, inputs = weight.shape
    wide = scales.float()
    if scales.numel() == 1 or scales.shape in ((outputs, 1), (outputs,)):
        wide = wide.reshape(-1, 1)
    elif block and scales.shape == (-(-outputs // block[0]), -(-inputs // block[1])):
        wide = wide.repeat_interleave(block[0], 0)[:outputs].repeat_interleave(block[1], 1)[:, :inputs]
    else:
        raise UnsupportedModel(
            f"a weight of {[outputs, inputs]} has scales of {list(scales.shape)}, blocks are {block}"
        )
    return weight.float() * wide


def _grouped(
    bits: int,
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    sizes: set[Any],
    order: torch.Tensor | None = None,
) -> Meaning:
    """Values [outputs, inputs], scales and zeros [outputs, groups], of groups of one of ``sizes`` inputs, or of all.

    ``order`` int [inputs] is the group of each input, where they are not neighbours a weight and no codes.
    """
    outputs, inputs = values.shape
    if scales.shape[0] != outputs or (zeros is not None and zeros.shape != scales.shape):
        found = None if zeros is None else list(zeros.shape)
        raise UnsupportedModel(f"{outputs} outputs have scales of {list(scales.shape)} and zero points of {found}")
    if scales.dtype not in SCALE_DTYPES or not scales.isfinite().all():
        raise UnsupportedModel(f"scales in {scales.dtype} are no finite numbers")
    groups = scales.shape[1]
    if order is not None and len(order) == inputs and not _is_in_order(order, groups):
        columns = order.long()
        wide = values.float() if zeros is None else values.float() - zeros.float()[:, columns]
        return wide * scales.float()[:, columns]
    if inputs % groups or (groups > 1 and inputs // groups not in sizes):
        raise UnsupportedModel(f"{inputs} inputs have {groups} scales, in groups of {sorted(map(str, sizes))}")
    offsets = None if zeros is None or not zeros.any() else zeros.to(torch.int8).contiguous()
    return Codes(bits, values.to(torch.int8).contiguous(), scales.contiguous(), offsets)


def _is_in_order(order: torch.Tensor, groups: int) -> bool:
    """Whether groups are of neighbouring inputs, all of one size."""
    inputs = len(order)
    return inputs % groups == 0 and torch.equal(order.long(), torch.arange(inputs) // (inputs // groups))


def _by_output(numbers: torch.Tensor, outputs: int) -> torch.Tensor:
    """One for the tensor, for each output, or for groups of each, as [outputs, groups]."""
    if numbers.numel() == 1:
        return numbers.reshape(1, 1).expand(outputs, 1)
    return numbers.reshape(len(numbers), -1)


def _unpacked(words: torch.Tensor, bits: int, *, along: int) -> torch.Tensor:
    """int32 words [rows, columns] as codes, from their lowest bits up, behind one another ``along`` this dimension."""
    if words.dtype != torch.int32 or words.dim() != 2:
        raise UnsupportedModel(f"codes of {list(words.shape)} in {words.dtype} are not packed in words of 32 bits")
    rows = words.T if along == 0 else words
    codes = (rows[:, :, None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & (1 << bits) - 1
    return codes.flatten(1).T if along == 0 else codes.flatten(1)


_PACKED = frozenset(("weight_packed", "weight_shape", "weight_scale"))
_SCALED = frozenset(("weight", "weight_scale"))
_INVERSE = frozenset(("weight", "weight_scale_inv"))
_WORDS = frozenset(("qweight", "qzeros", "scales"))
_FORMATS = {
    COMPRESSED_TENSORS: _Format(
        frozenset(("weight_packed", "weight_scale")),
        (_PACKED, _SCALED),
        frozenset(("weight_zero_point", "weight_g_idx")),
        _compressed,
    ),
    AWQ: _Format(frozenset(("qweight",)), (_WORDS,), frozenset(), _awq),
    GPTQ: _Format(frozenset(("qweight",)), (_WORDS,), frozenset(("g_idx",)), _gptq),
    FP8: _Format(frozenset(("weight_scale_inv", "weight_scale")), (_INVERSE, _SCALED), frozenset(), _fp8),
}
