"""What a configuration says of quantised weights: the method's name, and why one is not served."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from shared.quantisation import quantisation, quantisation_reasons
from tests.quantised_checkpoints import SCHEMES


def reasons(settings: dict[str, Any]) -> list[str]:
    return list(quantisation_reasons({"model_type": "llama", "quantization_config": settings}))


def changed(scheme: str, **fields: Any) -> dict[str, Any]:
    return copy.deepcopy(SCHEMES[scheme].settings) | fields


def compressed(**fields: Any) -> dict[str, Any]:
    """With another scheme of its only group."""
    settings = changed("packed_int4")
    settings["config_groups"]["group_0"] |= fields
    return settings


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_served_has_no_reason_against_it(scheme: str) -> None:
    """All schemes of the tests' checkpoints."""
    assert reasons(SCHEMES[scheme].settings) == []


def test_a_format_may_be_spelled_as_torch_spells_it() -> None:
    """As the checkpoints of MiniMax M2 do."""
    assert reasons(changed("fp8", fmt="float8_e4m3fn")) == []


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised with bitsandbytes, which is not served"),
        ({"quant_method": "fbgemm_fp8"}, r"quantised with FP8 \(fbgemm\), which is not served"),
        ({"bits": 4}, "quantised with an unnamed method"),
        (changed("awq", version="gemv"), "AWQ, and the layout gemv is not understood"),
        (changed("awq", bits=8), "AWQ, and codes of 8 bits are not served"),
        (changed("gptq", bits=3), "GPTQ, and codes of 3 bits are not served"),
        (changed("gptq", checkpoint_format="marlin"), "the layout marlin is not understood"),
        (changed("fp8", activation_scheme="static"), r"FP8, and its activations have scales of their own \(static\)"),
        (changed("fp8", fmt="e5m2"), "its fmt is e5m2, not e4m3"),
        (changed("packed_int4", format="marlin-24"), "the layout marlin-24 is not understood"),
        (changed("packed_int4", config_groups={}), "its config_groups say nothing"),
        (changed("packed_int4", kv_cache_scheme={"num_bits": 8}), "its KV is to be quantised"),
        (changed("packed_int4", sparsity_config={"format": "sparse-24-bitmask"}), r"sparse \(sparse-24-bitmask\)"),
        (changed("packed_int4", transform_config={"config_groups": {}}), "are to be transformed"),
        (compressed(weights={"num_bits": 3, "type": "int"}), "weights of 3 bits, int are not served"),
        (compressed(weights={"num_bits": 4, "type": "float"}), "weights of 4 bits, float are not served"),
        (compressed(input_activations={"num_bits": 8, "dynamic": False}), "its activations have scales of their own"),
        (compressed(input_activations={"num_bits": 4, "dynamic": "local"}), "its activations have scales of their own"),
        (compressed(output_activations={"num_bits": 8}), "outputs of its layers are to be quantised"),
        (compressed(format="nvfp4-pack-quantized"), "the layout nvfp4-pack-quantized is not understood"),
    ],
)
def test_what_is_not_understood_is_refused(settings: dict[str, Any], reason: str) -> None:
    """With the method and the reason."""
    found = reasons(settings)

    assert len(found) == 1
    assert re.search(reason, found[0])


@pytest.mark.parametrize(
    ("found", "method"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "AWQ"),
        ({"quantization_config": {"quant_method": "a-new-one"}}, "a-new-one"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "mxfp4"}}}, "MXFP4"),
        ({"quantization_config": None}, None),
        ({}, None),
    ],
)
def test_methods_have_names(found: dict[str, Any], method: str | None) -> None:
    """Wherever the configuration has them."""
    assert quantisation({"model_type": "llama", **found}) == method
