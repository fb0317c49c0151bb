"""Tiny checkpoints in every quantised format that is served, each beside an unquantised one of the same weights.

They are written by loops over single numbers, from the formats' own documents: nothing of the code under test is used.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

GROUP = 32
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Modules that are quantised where nobody names others; embeddings, norms and the head are not."""

Tensors = dict[str, torch.Tensor]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Scheme:
    """``quantise`` makes tensors of a weight float32 [outputs, inputs], and the weight that they mean."""

    settings: dict[str, Any]
    quantise: Callable[[Array], tuple[Tensors, Array]]


def quantise_checkpoint(source: Path, out: Path, scheme: str, layers: tuple[str, ...] = LAYERS) -> tuple[Path, Path]:
    """Folders in ``out`` with ``layers`` of the checkpoint ``source`` as ``scheme`` has them, and with what they mean,
    in float32.
    """
    found = SCHEMES[scheme]
    quantised, plain = out / "quantised", out / "plain"
    for folder in (quantised, plain):
        shutil.copytree(source, folder)
    for path in sorted(source.glob("*.safetensors")):
        tensors: dict[str, Tensors] = {"quantised": {}, "plain": {}}
        for name, tensor in load_file(path).items():
            layer, _, end = name.rpartition(".")
            if end == "weight" and layer.endswith(layers):
                parts, meant = found.quantise(tensor.float().numpy())
                tensors["quantised"] |= {f"{layer}.{part}": value.contiguous() for part, value in parts.items()}
                tensors["plain"][name] = torch.from_numpy(meant)
            else:
                tensors["quantised"][name] = tensors["plain"][name] = tensor.float()
        save_file(tensors["quantised"], quantised / path.name, metadata={"format": "pt"})
        save_file(tensors["plain"], plain / path.name, metadata={"format": "pt"})
    for index in quantised.glob("*.index.json"):
        index.unlink()  # It names tensors that are others now.
    _change(quantised / "config.json", quantization_config=found.settings, dtype="float32")
    _change(plain / "config.json", dtype="float32")
    return quantised, plain


def mxfp4_checkpoint(source: Path, out: Path) -> tuple[Path, Path]:
    """The same with the experts of a gpt-oss checkpoint as its publishers have them, MXFP4."""
    quantised, plain = out / "quantised", out / "plain"
    for folder in (quantised, plain):
        shutil.copytree(source, folder)
    for path in sorted(source.glob("*.safetensors")):
        stored: Tensors = {}
        meant: Tensors = {}
        for name, tensor in load_file(path).items():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                blocks, scales, weight = _fp4_blocks(tensor.float().transpose(1, 2).numpy())
                stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
                meant[name] = weight.transpose(1, 2).contiguous()
            else:
                stored[name] = meant[name] = tensor.float()
        save_file(stored, quantised / path.name, metadata={"format": "pt"})
        save_file(meant, plain / path.name, metadata={"format": "pt"})
    for index in quantised.glob("*.index.json"):
        index.unlink()  # It names tensors that are others now.
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.layers.*.mlp.router"]}
    _change(quantised / "config.json", quantization_config=settings, dtype="float32")
    _change(plain / "config.json", dtype="float32")
    return quantised, plain


def _fp4_blocks(weight: Array) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks and scales of a weight [experts, outputs, inputs], and what they mean (OCP Microscaling 1.0)."""
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    experts, outputs, inputs = weight.shape
    blocks = np.zeros((experts, outputs, inputs // 32, 16), dtype=np.uint8)
    scales, meant = np.zeros(blocks.shape[:3], dtype=np.uint8), np.zeros_like(weight)
    for at in np.ndindex(scales.shape):
        part = weight[at[0], at[1], 32 * at[2] : 32 * at[2] + 32]
        exponent = int(np.floor(np.log2(np.abs(part).max()))) - 2
        scales[at] = exponent + 127
        for i, value in enumerate(part):
            code = int(np.argmin([abs(abs(value) / 2.0**exponent - number) for number in numbers]))
            meant[at[0], at[1], 32 * at[2] + i] = np.copysign(numbers[code], value) * 2.0**exponent
            blocks[at][i // 2] |= (code | (8 if value < 0 else 0)) << 4 * (i % 2)
    return torch.from_numpy(blocks), torch.from_numpy(scales), torch.from_numpy(meant)


def _change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")


def _groups(weight: Array, group: int) -> Iterator[tuple[int, int, Array]]:
    for output in range(weight.shape[0]):
        for number in range(weight.shape[1] // group):
            yield output, number, weight[output, number * group : (number + 1) * group]


def _codes(weight: Array, bits: int, group: int, kind: torch.dtype, *, has_zeros: bool) -> tuple[Array, Array, Array]:
    """Codes from 0 to 2**bits - 1 [outputs, inputs], scales and zero points [outputs, groups]."""
    most = (1 << bits) - 1
    codes = np.zeros(weight.shape, dtype=np.int64)
    shape = weight.shape[0], weight.shape[1] // group
    scales, zeros = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.int64)
    for output, number, part in _groups(weight, group):
        spread = part.max() - part.min() if has_zeros else 2 * np.abs(part).max()
        scale = torch.tensor(spread / most).to(kind).float().item()
        # The least stored zero point of a layout is one, and the greatest is below all bits set.
        zero = int(np.clip(np.rint(-part.min() / scale), 1, most - 1)) if has_zeros else (most + 1) // 2
        scales[output, number], zeros[output, number] = scale, zero
        codes[output, number * group : (number + 1) * group] = np.clip(np.rint(part / scale) + zero, 0, most)
    return codes, scales, zeros


def _meant(codes: Array, scales: Array, zeros: Array, order: Array | None = None) -> Array:
    weight = np.zeros(codes.shape, dtype=np.float32)
    inputs = codes.shape[1]
    for i in range(inputs):
        group = i * scales.shape[1] // inputs if order is None else order[i]
        weight[:, i] = (codes[:, i] - zeros[:, group]).astype(np.float32) * scales[:, group]
    return weight


def _words(codes: Array, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes [rows, columns] as int32 [rows, columns * bits / 32]; the code of column c is ``places[c]`` in its word."""
    each = 32 // bits
    places = places or tuple(range(each))
    words = np.zeros((codes.shape[0], -(-codes.shape[1] // each)), dtype=np.uint64)
    for column in range(codes.shape[1]):
        words[:, column // each] |= codes[:, column].astype(np.uint64) << np.uint64(bits * places[column % each])
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def _packed(bits: int, kind: torch.dtype, *, has_zeros: bool) -> Callable[[Array], tuple[Tensors, Array]]:
    """compressed-tensors, pack-quantized."""

    def quantise(weight: Array) -> tuple[Tensors, Array]:
        codes, scales, zeros = _codes(weight, bits, GROUP, kind, has_zeros=has_zeros)
        tensors = {
            "weight_packed": _words(codes, bits),
            "weight_shape": torch.tensor(weight.shape),
            "weight_scale": torch.from_numpy(scales).to(kind),
        }
        if has_zeros:
            tensors["weight_zero_point"] = _words(zeros.T, bits).T
        return tensors, _meant(codes, scales, zeros)

    return quantise


def _channels(weight: Array) -> tuple[Tensors, Array]:
    """compressed-tensors, int-quantized, a scale for each output."""
    codes, scales, zeros = _codes(weight, 8, weight.shape[1], torch.bfloat16, has_zeros=False)
    tensors = {
        "weight": torch.from_numpy((codes - 128).astype(np.int8)),
        "weight_scale": torch.from_numpy(scales).to(torch.bfloat16),
    }
    return tensors, _meant(codes, scales, zeros)


def _awq(weight: Array) -> tuple[Tensors, Array]:
    codes, scales, zeros = _codes(weight, 4, GROUP, torch.float16, has_zeros=True)
    places = (0, 4, 1, 5, 2, 6, 3, 7)  # The inverse of AutoAWQ's AWQ_ORDER.
    tensors = {
        "qweight": _words(codes.T, 4, places),
        "qzeros": _words(zeros.T, 4, places),
        "scales": torch.from_numpy(scales.T.copy()).half(),
    }
    return tensors, _meant(codes, scales, zeros)


def _gptq(bits: int, *, stored_less: int, is_shuffled: bool) -> Callable[[Array], tuple[Tensors, Array]]:
    def quantise(weight: Array) -> tuple[Tensors, Array]:
        inputs = weight.shape[1]
        shuffled = np.random.default_rng(inputs).permutation(inputs) if is_shuffled else np.arange(inputs)
        codes, scales, zeros = _codes(weight[:, shuffled], bits, GROUP, torch.float16, has_zeros=True)
        order = np.zeros(inputs, dtype=np.int32)
        order[shuffled] = np.arange(inputs) // GROUP
        back = np.argsort(shuffled)
        codes = codes[:, back]
        tensors = {
            "qweight": _words(codes, bits).T,
            "qzeros": _words(zeros.T - stored_less, bits),
            "scales": torch.from_numpy(scales.T.copy()).half(),
            "g_idx": torch.from_numpy(order),
        }
        return tensors, _meant(codes, scales, zeros, order)

    return quantise


def _fp8(scale_name: str, block: tuple[int, int] | None, *, by_output: bool = False) -> Callable[[Array], Any]:
    """fp8 with a scale for each block (the last ones cut), each output, or the whole."""

    def quantise(weight: Array) -> tuple[Tensors, Array]:
        outputs, inputs = weight.shape
        rows, columns = block or ((1, inputs) if by_output else weight.shape)
        scales = np.zeros((-(-outputs // rows), -(-inputs // columns)), dtype=np.float32)
        stored, meant = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), np.zeros_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = np.abs(weight[at]).max() / 448
                stored[at] = torch.from_numpy(weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
                meant[at] = stored[at].float().numpy() * scales[i, j]
        shaped = torch.from_numpy(scales)
        return {"weight": stored, scale_name: shaped if block or by_output else shaped.reshape(1)}, meant

    return quantise


def _compressed(layout: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _weights(bits: int, kind: str, strategy: str, **others: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **others}


_BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_GROUPS = {"group_size": GROUP}

SCHEMES: dict[str, Scheme] = {
    "packed_int4": Scheme(
        _compressed("pack-quantized", _weights(4, "int", "group", **_GROUPS)),
        _packed(4, torch.bfloat16, has_zeros=False),
    ),
    "packed_int4_zeros": Scheme(
        _compressed("pack-quantized", _weights(4, "int", "group", **_GROUPS) | {"symmetric": False}),
        _packed(4, torch.float16, has_zeros=True),
    ),
    "packed_int8": Scheme(
        _compressed("pack-quantized", _weights(8, "int", "group", **_GROUPS)),
        _packed(8, torch.float32, has_zeros=False),
    ),
    "int8": Scheme(_compressed("int-quantized", _weights(8, "int", "channel"), _BY_TOKEN), _channels),
    "float8": Scheme(
        _compressed("float-quantized", _weights(8, "float", "channel"), {**_BY_TOKEN, "type": "float"}),
        _fp8("weight_scale", None, by_output=True),
    ),
    "float8_blocks": Scheme(
        _compressed("float-quantized", _weights(8, "float", "block", block_structure=[48, 40])),
        _fp8("weight_scale", (48, 40)),
    ),
    "awq": Scheme({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, _awq),
    "gptq": Scheme(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
        _gptq(4, stored_less=1, is_shuffled=False),
    ),
    "gptq_shuffled": Scheme(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
        _gptq(4, stored_less=1, is_shuffled=True),
    ),
    "gptq_v2_int8": Scheme(
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        _gptq(8, stored_less=0, is_shuffled=False),
    ),
    "fp8_blocks": Scheme(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [40, 48]},
        _fp8("weight_scale_inv", (40, 48)),
    ),
    "fp8": Scheme({"quant_method": "fp8", "activation_scheme": "dynamic"}, _fp8("weight_scale", None)),
}
"""By a name: what ``quantization_config`` says, and how weights are written."""

CODED = ("packed_int4", "packed_int4_zeros", "packed_int8", "int8", "awq", "gptq", "gptq_v2_int8")
"""Those that kernels compute with as codes; others are dequantised."""
