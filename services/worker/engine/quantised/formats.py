"""The meaning of one quantised layer's tensors, format by format.

Sources: compressed-tensors 0.20 (``pack_to_int32``, ``QuantizationArgs``); AutoAWQ's layout "gemm"; AutoGPTQ's "gptq"
and "gptq_v2"; fp8 as DeepSeek-V3 stores it, a scale for each block; MXFP4 of gpt-oss's experts (OCP Microscaling
Formats 1.0, sections 5.2 and 5.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch

from services.worker.engine.quantised.codes import SCALE_DTYPES, Codes
from shared.errors import UnsupportedModel
from shared.quantisation import AWQ, COMPRESSED_TENSORS, FP8, GPTQ, MXFP4

Tensors = Mapping[str, torch.Tensor]
"""Tensors of one layer by the ends of their names, as ``weight_scale``."""

Meaning = Codes | torch.Tensor
"""Codes, or the weight itself where it has no such form: float32 [outputs, inputs], of experts as in ``_mxfp4``."""

Settings = Mapping[str, Any]
"""``quantization_config`` of a checkpoint."""

Sizes = Mapping[str, Sequence[int]]
"""Shapes of a layer's tensors by the ends of their names; of ``weight_shape`` the numbers that it has."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of four bits, without the highest, which is the sign."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of eight codes in 32 bits, from the lowest bits up, belong to neighbouring outputs."""


@dataclass(frozen=True, slots=True)
class _Format:
    """A format of quantised layers.

    ``marks`` tell a quantised layer from others; ``kinds`` are the sets of tensors that it may consist of, and
    ``optional`` those that it may have besides. ``shape`` is that of the weight. In names of tensors ``joint`` stands
    before what kind they are, and the weight is called ``weight``, after the layer.
    """

    marks: frozenset[str]
    kinds: tuple[frozenset[str], ...]
    optional: frozenset[str]
    read: Callable[[Settings, Tensors], Meaning]
    shape: Callable[[Sizes], tuple[int, ...]]
    joint: str = "."
    weight: str = ".weight"

    @property
    def own(self) -> frozenset[str]:
        """The tensors that layers have which are quantised, and no others."""
        return (frozenset().union(*self.kinds) | self.optional) - {"weight"}


def layer_of(method: str, name: str) -> tuple[str, str]:
    """Return the layer of the tensor ``name`` of a checkpoint, and the end of the name, which says what it is."""
    layer, _, end = name.rpartition(_FORMATS[method].joint)
    return layer, end


def name_of(method: str, layer: str, end: str) -> str:
    """Return the name of a layer's tensor, see :func:`layer_of`."""
    return f"{layer}{_FORMATS[method].joint}{end}" if layer else end


def weight_name(method: str, layer: str) -> str:
    """Return the name that the weight of a layer would have in an unquantised checkpoint."""
    return layer + _FORMATS[method].weight


def is_quantised(method: str, names: set[str]) -> bool:
    """Return whether tensors of these names make a quantised layer."""
    return bool(_FORMATS[method].marks & names)


def check_plain(method: str, layer: str, end: str, dtype: str | torch.dtype) -> None:
    """Raise UnsupportedModel unless a tensor of a layer that is not quantised can be read as it is.

    ``dtype`` may be as safetensors calls it. Codes without scales are no weights, and neither are scales without codes,
    such as those by which AWQ has some models divide activations.
    """
    name = name_of(method, layer, end)
    if dtype not in _PLAIN_DTYPES:
        raise UnsupportedModel(f"{name} in {dtype} is not understood")
    if end in _FORMATS[method].own:
        raise UnsupportedModel(f"{name} belongs to codes that {layer} has not, so what it scales is not understood")


def none_quantised(what: object, method: str) -> UnsupportedModel:
    """Return the error for a checkpoint whose configuration says that it is quantised, while no layer is."""
    return UnsupportedModel(f"{what} says that it is quantised with {method}, and none of its layers is")


def read_layer(method: str, settings: Settings, tensors: Tensors) -> Meaning:
    """Read the weight of one layer of a checkpoint that is quantised by ``method`` with these ``settings``.

    Raises UnsupportedModel for tensors that do not fit together, and for any that is not understood.
    """
    return _form(method, tensors.keys()).read(settings, tensors)


def dequantised(meaning: Meaning, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of a layer, rounded once to ``dtype``."""
    return meaning.dequantised(dtype) if isinstance(meaning, Codes) else meaning.to(dtype)


def weight_shape(method: str, sizes: Sizes) -> tuple[int, ...]:
    """Return [outputs, inputs] of the weight that a layer's tensors of these ``sizes`` mean.

    Raises UnsupportedModel as :func:`read_layer` does for their names; what does not fit together is found there.
    """
    return _form(method, sizes.keys()).shape(sizes)


def _form(method: str, names: AbstractSet[str]) -> _Format:
    form = _FORMATS[method]
    kind = next((each for each in form.kinds if each <= names), None)
    odd = sorted(names - (kind or frozenset()) - form.optional)
    if kind is None or odd:
        raise UnsupportedModel(f"tensors {', '.join(odd)} of a layer are not understood")
    return form


def _awq(settings: Settings, tensors: Tensors) -> Meaning:
    """Read qweight int32 [inputs, outputs / 8], qzeros int32 [groups, outputs / 8], scales [groups, outputs]."""
    codes, zeros = (_awq_columns(_unpacked(tensors[name], 4, along=1)) for name in ("qweight", "qzeros"))
    size = settings.get("group_size", settings.get("q_group_size"))
    return _grouped(4, codes.T - 8, tensors["scales"].T, zeros.T - 8, sizes={size})


def _awq_shape(sizes: Sizes) -> tuple[int, ...]:
    return sizes["scales"][-1], sizes["qweight"][0]


def _awq_columns(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(len(codes), -1, 8)[:, :, _AWQ_ORDER].flatten(1)


def _gptq(settings: Settings, tensors: Tensors) -> Meaning:
    """Read qweight, qzeros, scales and g_idx.

    They are qweight int32 [inputs * bits / 32, outputs], qzeros int32 [groups, outputs * bits / 32], scales [groups,
    outputs], and g_idx int32 [inputs], the group of each input.
    """
    scales, words = tensors["scales"], tensors["qzeros"]
    bits = _gptq_bits({"scales": scales.shape, "qzeros": words.shape})
    codes, zeros = _unpacked(tensors["qweight"], bits, along=0), _unpacked(words, bits, along=1)
    if str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower() == "gptq":
        # Zero points were stored less one, and readers differ in what the greatest means: 0 or one more.
        if int(zeros.max()) == (1 << bits) - 1:
            raise UnsupportedModel("a zero point in the layout gptq may be 0 or beyond the greatest code")
        zeros = zeros + 1
    bias = 1 << bits - 1
    sizes = {settings.get("group_size")}
    return _grouped(bits, codes.T - bias, scales.T, zeros.T - bias, sizes=sizes, order=tensors.get("g_idx"))


def _gptq_bits(sizes: Sizes) -> int:
    bits = sizes["qzeros"][-1] * 32 // max(1, sizes["scales"][-1])
    if bits not in (4, 8):
        raise UnsupportedModel(f"a layer has codes of {bits} bits")
    return bits


def _gptq_shape(sizes: Sizes) -> tuple[int, ...]:
    return sizes["scales"][-1], sizes["qweight"][0] * 32 // _gptq_bits(sizes)


def _compressed(settings: Settings, tensors: Tensors) -> Meaning:
    """Read weight_packed or weight, and weight_scale.

    They are weight_packed int32 [outputs, inputs * bits / 32], or weight [outputs, inputs] of 8 bits.
    """
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
    order = tensors.get("weight_g_idx")
    if order is not None and int(order.max()) < 0:
        order = None  # -1 for every input says that groups are of neighbours.
    zeros = tensors.get("weight_zero_point")
    if zeros is not None and "weight_packed" in tensors:
        zeros = _unpacked(zeros, bits, along=0)[:outputs] - (1 << bits - 1)
    return _grouped(
        bits,
        values,
        _by_output(tensors["weight_scale"], outputs),
        None if zeros is None else _by_output(zeros, outputs).int(),
        sizes={each.get("group_size") for each in weights},
        order=order,
    )


def _plain_shape(sizes: Sizes) -> tuple[int, ...]:
    return tuple(sizes["weight"] if "weight" in sizes else sizes["weight_shape"])


def _fp8(settings: Settings, tensors: Tensors) -> torch.Tensor:
    """Read weight float8 [outputs, inputs], and the scale of the tensor, of outputs or of blocks."""
    scales = tensors["weight_scale_inv"] if "weight_scale_inv" in tensors else tensors["weight_scale"]
    block = settings.get("weight_block_size")
    return _scaled(tensors["weight"], scales, None if block is None else tuple(block))


def _mxfp4(_: Settings, tensors: Tensors) -> torch.Tensor:
    """Read blocks, two numbers a byte, and scales.

    They are blocks uint8 [experts, outputs, groups, 16] and scales uint8 [experts, outputs, groups]. Return
    bfloat16 [experts, inputs, outputs], which holds every number exactly.
    """
    blocks, scales = tensors["blocks"], tensors["scales"]
    if {blocks.dtype, scales.dtype} != {torch.uint8} or blocks.dim() != 4 or blocks.shape != (*scales.shape, 16):
        raise UnsupportedModel(f"blocks of {list(blocks.shape)} have scales of {list(scales.shape)}")
    if int(scales.max()) > 252:  # 255 is no number, and with the two before it the greatest numbers would not fit.
        raise UnsupportedModel(f"a block has the scale 2 ** {int(scales.max()) - 127}")
    experts, outputs, groups, _width = blocks.shape
    numbers = torch.tensor([*_E2M1, *(-each for each in _E2M1)], dtype=torch.bfloat16)
    # A scale is the exponent of a number whose other bits are 0; the lowest one is that of a subnormal number.
    bits = scales.short() << 7
    factors = torch.where(bits == 0, 1 << 6, bits).view(torch.bfloat16)
    found = torch.empty(experts, groups * 32, outputs, dtype=torch.bfloat16)
    for expert, mine in enumerate(blocks):
        codes = torch.stack((mine & 15, mine >> 4), dim=-1).view(outputs, groups, 32)
        found[expert] = (numbers[codes.int()] * factors[expert][:, :, None]).view(outputs, -1).T
    return found


def _mxfp4_shape(sizes: Sizes) -> tuple[int, ...]:
    experts, outputs, *rest = sizes["blocks"]
    return experts, math.prod(rest) * 2, outputs


def _scaled(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, ...] | None) -> torch.Tensor:
    """Return float32 [outputs, inputs]. The last blocks may be cut."""
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
    """Return codes of values [outputs, inputs], in groups of one of ``sizes`` inputs, or of all.

    Scales and zeros are [outputs, groups]. ``order`` int [inputs] is the group of each input. Where a group's inputs
    are not neighbours, the result is a weight and no codes.
    """
    outputs, inputs = values.shape
    if scales.shape[0] != outputs or (zeros is not None and zeros.shape != scales.shape):
        found = None if zeros is None else list(zeros.shape)
        raise UnsupportedModel(f"{outputs} outputs have scales of {list(scales.shape)} and zero points of {found}")
    if scales.dtype not in SCALE_DTYPES or not scales.isfinite().all():
        raise UnsupportedModel(f"scales in {scales.dtype} are no finite numbers")
    groups = scales.shape[1]
    if order is not None and not 0 <= int(order.min()) <= int(order.max()) < groups:
        raise UnsupportedModel(f"inputs are of groups {int(order.min())} to {int(order.max())}, of {groups}")
    if order is not None and len(order) == inputs and not _is_in_order(order, groups):
        columns = order.long()
        wide = values.float() if zeros is None else values.float() - zeros.float()[:, columns]
        return wide * scales.float()[:, columns]
    if inputs % groups or (groups > 1 and inputs // groups not in sizes):
        raise UnsupportedModel(f"{inputs} inputs have {groups} scales, in groups of {sorted(map(str, sizes))}")
    offsets = None if zeros is None or not zeros.any() else zeros.to(torch.int8).contiguous()
    return Codes(bits, values.to(torch.int8).contiguous(), scales.contiguous(), offsets)


def _is_in_order(order: torch.Tensor, groups: int) -> bool:
    """Return whether groups are of neighbouring inputs, all of one size."""
    inputs = len(order)
    return inputs % groups == 0 and torch.equal(order.long(), torch.arange(inputs) // (inputs // groups))


def _by_output(numbers: torch.Tensor, outputs: int) -> torch.Tensor:
    """Return one number for the tensor, for each output, or for groups of each, as [outputs, groups]."""
    if numbers.numel() == 1:
        return numbers.reshape(1, 1).expand(outputs, 1)
    return numbers.reshape(len(numbers), -1)


def _unpacked(words: torch.Tensor, bits: int, *, along: int) -> torch.Tensor:
    """Return codes of int32 words [rows, columns], from the lowest bits up, one after another ``along`` a dimension."""
    if words.dtype != torch.int32 or words.dim() != 2:
        raise UnsupportedModel(f"codes of {list(words.shape)} in {words.dtype} are not packed in words of 32 bits")
    rows = words.T if along == 0 else words
    codes = (rows[:, :, None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & (1 << bits) - 1
    return codes.flatten(1).T if along == 0 else codes.flatten(1)


_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16", torch.float64, torch.float32, torch.float16, torch.bfloat16)

_PACKED = frozenset(("weight_packed", "weight_shape", "weight_scale"))
_SCALED = frozenset(("weight", "weight_scale"))
_INVERSE = frozenset(("weight", "weight_scale_inv"))
_WORDS = frozenset(("qweight", "qzeros", "scales"))
_BLOCKS = frozenset(("blocks", "scales"))
_FORMATS = {
    COMPRESSED_TENSORS: _Format(
        frozenset(("weight_packed", "weight_scale")),
        (_PACKED, _SCALED),
        frozenset(("weight_zero_point", "weight_g_idx")),
        _compressed,
        _plain_shape,
    ),
    AWQ: _Format(frozenset(("qweight",)), (_WORDS,), frozenset(), _awq, _awq_shape),
    GPTQ: _Format(frozenset(("qweight",)), (_WORDS,), frozenset(("g_idx",)), _gptq, _gptq_shape),
    FP8: _Format(frozenset(("weight_scale_inv", "weight_scale")), (_INVERSE, _SCALED), frozenset(), _fp8, _plain_shape),
    MXFP4: _Format(_BLOCKS, (_BLOCKS,), frozenset(), _mxfp4, _mxfp4_shape, joint="_", weight=""),
}
