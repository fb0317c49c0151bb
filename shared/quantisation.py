"""Quantised checkpoints by their raw configuration: the method, and every reason why one is not served.

Checkpoints are served that can be dequantised without loss: weights of 4 or 8 bits, or in fp8, with scales by tensor,
channel, group or block. Activations are computed in the data type of the model. Where a checkpoint says that they are
quantised as they come ("dynamic"), that is a way to compute faster, and leaving it out is closer to the original model;
where they have scales of their own in the checkpoint ("static"), it means another model, which is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

COMPRESSED_TENSORS, AWQ, GPTQ, FP8, MXFP4 = "compressed-tensors", "awq", "gptq", "fp8", "mxfp4"

NAMES = {
    AWQ: "AWQ",
    GPTQ: "GPTQ",
    FP8: "FP8",
    "fbgemm_fp8": "FP8 (fbgemm)",
    COMPRESSED_TENSORS: "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    MXFP4: "MXFP4",
    "gguf": "GGUF",
}
"""Usual names of the library's methods; others keep the library's."""

_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STATIC = "its activations have scales of their own (static), and they are not quantised here"


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantisation settings of a raw configuration; None if its weights are not quantised."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        found = part.get("quantization_config") or part.get("compression_config")
        if isinstance(found, dict):
            return found
    return None


def method_of(settings: Mapping[str, Any]) -> str:
    """Return the library's name of the method, or "an unnamed method"."""
    return str(settings.get("quant_method") or settings.get("quant_type") or "an unnamed method")


def quantisation(config: Mapping[str, Any]) -> str | None:
    """Return the usual name of the method that quantised a configuration's weights; None if they are not quantised."""
    settings = settings_of(config)
    if settings is None:
        return None
    method = method_of(settings)
    return NAMES.get(method.lower(), method)


def quantisation_reasons(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why weights quantised as in a raw configuration are not served."""
    settings = settings_of(config)
    if settings is None:
        return
    check = _CHECKS.get(method_of(settings).lower())
    name = quantisation(config)
    if check is None:
        yield f"its weights are quantised with {name}, which is not served: take another checkpoint of the model"
        return
    for reason in check(settings):
        yield f"its weights are quantised with {name}, and {reason}"


def _awq(settings: Mapping[str, Any]) -> Iterator[str]:
    bits = settings.get("bits", settings.get("w_bit", 4))
    if bits != 4:
        yield f"codes of {bits} bits are not served"
    layout = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if layout != "gemm" or settings.get("backend") == "llm-awq":
        yield f"the layout {layout} is not understood, only gemm"


def _gptq(settings: Mapping[str, Any]) -> Iterator[str]:
    if settings.get("bits") not in (4, 8):
        yield f"codes of {settings.get('bits')} bits are not served"
    layout = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    if layout not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        yield f"the layout {layout} is not understood, only gptq and gptq_v2"


def _fp8(settings: Mapping[str, Any]) -> Iterator[str]:
    if str(settings.get("activation_scheme", "dynamic")).lower() != "dynamic":
        yield _STATIC
    for field, known in (("fmt", ("e4m3", "float8_e4m3fn")), ("expert_dtype", ("fp8",))):
        if settings.get(field, known[0]) not in known:
            yield f"its {field} is {settings[field]}, not {known[0]}"


def _compressed(settings: Mapping[str, Any]) -> Iterator[str]:
    groups = settings.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    if not schemes or not all(isinstance(scheme, dict) for scheme in schemes):
        yield "its config_groups say nothing"
        return
    for layout in sorted({str(scheme.get("format") or settings.get("format")) for scheme in schemes}):
        if layout not in _COMPRESSED_FORMATS:
            yield f"the layout {layout} is not understood, only {', '.join(_COMPRESSED_FORMATS)}"
    for kind in sorted({_kind(scheme.get("weights")) for scheme in schemes}):
        if kind not in ("4 bits, int", "8 bits, int", "8 bits, float"):
            yield f"weights of {kind} are not served"
    if any(_is_static(scheme.get("input_activations")) for scheme in schemes):
        yield _STATIC
    if any(scheme.get("output_activations") for scheme in schemes):
        yield "outputs of its layers are to be quantised"
    if settings.get("kv_cache_scheme"):
        yield "its KV is to be quantised, which is kept as it is computed here"
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        yield f"its weights are sparse ({sparsity['format']})"
    if settings.get("transform_config"):
        yield "inputs of its layers are to be transformed"


def _kind(weights: object) -> str:
    if not isinstance(weights, dict):
        return "nothing"
    return f"{weights.get('num_bits')} bits, {weights.get('type', 'int')}"


def _is_static(activations: object) -> bool:
    return isinstance(activations, dict) and activations.get("dynamic") is not True


def _mxfp4(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield nothing: the format has no variants."""
    yield from ()


_CHECKS = {AWQ: _awq, GPTQ: _gptq, FP8: _fp8, COMPRESSED_TENSORS: _compressed, MXFP4: _mxfp4}
