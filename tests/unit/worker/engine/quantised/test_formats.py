"""Tensors of quantised layers mean what the programs that publish them read there; what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from services.worker.engine.quantised.codes import Codes
from services.worker.engine.quantised.formats import is_quantised, read_layer, weight_shape
from shared.errors import UnsupportedModel
from tests.quantised_checkpoints import SCHEMES

GOLDEN = Path(__file__).with_name("published_layouts.safetensors")
"""Random layers [32, 64] in groups of 32 as words, and the weights that they mean: words that AutoAWQ 0.2.7
dequantised, and those that AutoGPTQ 0.7.1 and compressed-tensors 0.20.1 packed.
"""


def golden(layout: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    tensors = {
        name.partition(".")[2]: value for name, value in load_file(GOLDEN).items() if name.startswith(f"{layout}.")
    }
    return tensors, tensors.pop("weight")


@pytest.mark.parametrize(
    ("layout", "scheme"),
    [
        ("awq", "awq"),
        ("gptq4", "gptq"),
        ("gptq8", "gptq"),
        ("packed4", "packed_int4_zeros"),
        ("packed8", "packed_int8"),
    ],
)
def test_published_layouts_mean_what_their_programs_say(layout: str, scheme: str) -> None:
    """To the bit, in float32."""
    tensors, expected = golden(layout)
    settings = SCHEMES[scheme].settings

    found = read_layer(settings["quant_method"], settings, tensors)

    assert isinstance(found, Codes)
    assert (found.bits, found.group) == (8 if "8" in layout else 4, 32)
    assert torch.equal(found.dequantised(torch.float32), expected)


def test_an_order_of_groups_that_says_nothing_new_is_none() -> None:
    """Groups of neighbours are codes with ``g_idx`` and without; others are a weight."""
    tensors, expected = golden("gptq4")
    settings = SCHEMES["gptq"].settings
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(1))

    assert isinstance(read_layer("gptq", settings, {**tensors, "g_idx": tensors["g_idx"]}), Codes)
    del tensors["g_idx"]
    assert isinstance(read_layer("gptq", settings, tensors), Codes)
    assert isinstance(read_layer("gptq", settings, {**tensors, "g_idx": (shuffled // 32).int()}), torch.Tensor)
    assert expected.shape == (32, 64)


def test_groups_that_were_never_set_are_of_neighbours() -> None:
    """compressed-tensors begins with -1 for every input, and may store that."""
    tensors, expected = golden("packed4")
    settings = SCHEMES["packed_int4"].settings

    found = read_layer(
        "compressed-tensors", settings, {**tensors, "weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}
    )

    assert isinstance(found, Codes)
    assert torch.equal(found.dequantised(torch.float32), expected)


@pytest.mark.parametrize(
    ("layout", "scheme", "change", "reason"),
    [
        ("awq", "awq", {"g_idx": torch.zeros(64)}, "g_idx of a layer are not understood"),
        ("awq", "awq", {"qweight": torch.zeros(64, 4)}, "not packed in words"),
        ("awq", "awq", {"scales": torch.ones(3, 32)}, "zero points"),
        ("awq", "awq", {"scales": torch.full((2, 32), torch.inf)}, "no finite numbers"),
        ("gptq4", "gptq", {"qzeros": torch.full((2, 4), -1, dtype=torch.int32)}, "may be 0 or beyond"),
        ("gptq4", "gptq", {"g_idx": torch.full((64,), 2, dtype=torch.int32)}, "groups 2 to 2, of 2"),
        ("gptq4", "gptq", {"g_idx": torch.full((64,), -1, dtype=torch.int32)}, "groups -1 to -1, of 2"),
        ("gptq4", "gptq", {"qzeros": torch.zeros(2, 2, dtype=torch.int32)}, "codes of 2 bits"),
        ("packed4", "packed_int4", {"weight_shape": torch.tensor([32, 96])}, "packed in words"),
        ("packed4", "packed_int4", {"weight_global_scale": torch.ones(1)}, "weight_global_scale of a layer"),
        ("packed8", "packed_int8", {"weight_scale": torch.ones(32, 4)}, "zero points"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    layout: str, scheme: str, change: dict[str, torch.Tensor], reason: str
) -> None:
    """With what is wrong; nothing is guessed or left out."""
    tensors, _ = golden(layout)
    settings = SCHEMES[scheme].settings

    with pytest.raises(UnsupportedModel, match=reason):
        read_layer(settings["quant_method"], settings, tensors | change)


def test_groups_must_be_those_that_the_settings_name() -> None:
    """A number of scales that divides the inputs by chance is no proof."""
    tensors, _ = golden("awq")

    with pytest.raises(UnsupportedModel, match="64 inputs have 2 scales"):
        read_layer("awq", {**SCHEMES["awq"].settings, "group_size": 64}, tensors)


@pytest.mark.parametrize(
    ("weight", "scales", "settings"),
    [
        (torch.zeros(32, 64), torch.ones(1), {}),
        (torch.zeros(32, 64, dtype=torch.float8_e5m2), torch.ones(1), {}),
        (torch.zeros(32, 64, dtype=torch.float8_e4m3fn), torch.ones(2, 2), {}),
        (torch.zeros(32, 64, dtype=torch.float8_e4m3fn), torch.ones(2, 2), {"weight_block_size": [16, 16]}),
    ],
)
def test_scales_of_fp8_must_fit(weight: torch.Tensor, scales: torch.Tensor, settings: dict[str, Any]) -> None:
    """One, one for each output, or one for each block that the settings name, of a weight in fp8."""
    with pytest.raises(UnsupportedModel, match="weight of"):
        read_layer("fp8", settings, {"weight": weight, "weight_scale": scales})


def test_layers_are_known_by_their_tensors() -> None:
    """A layer that was left as it was has none of them."""
    assert is_quantised("awq", {"qweight", "qzeros", "scales"})
    assert is_quantised("fp8", {"weight", "weight_scale_inv"})
    for method in ("awq", "gptq", "fp8", "compressed-tensors"):
        assert not is_quantised(method, {"weight", "bias"})


def test_mxfp4_means_what_the_library_reads() -> None:
    """Every number of four bits with every scale that fits, the lowest of which are below normal numbers."""
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 46, 11, 16), dtype=torch.uint8, generator=random)
    scales = torch.arange(2 * 46 * 11).remainder(253).to(torch.uint8).view(2, 46, 11)

    found = read_layer("mxfp4", {}, {"blocks": blocks, "scales": scales})

    assert isinstance(found, torch.Tensor)
    assert found.shape == weight_shape("mxfp4", {"blocks": blocks.shape, "scales": scales.shape}) == (2, 352, 46)
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).bfloat16())
    assert found.isfinite().all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scales": torch.full((1, 4, 2), 255, dtype=torch.uint8)}, r"a block has the scale 2 \*\* 128"),
        ({"scales": torch.zeros(1, 4, 3, dtype=torch.uint8)}, r"blocks of \[1, 4, 2, 16\] have scales of \[1, 4, 3\]"),
        ({"scales": torch.zeros(1, 4, 2)}, "blocks of"),
        ({"zeros": torch.zeros(1, 4, 2)}, "tensors zeros of a layer are not understood"),
    ],
)
def test_blocks_of_mxfp4_must_fit(change: dict[str, torch.Tensor], reason: str) -> None:
    """A scale that is no number included."""
    tensors = {"blocks": torch.zeros(1, 4, 2, 16, dtype=torch.uint8), "scales": torch.zeros(1, 4, 2, dtype=torch.uint8)}

    with pytest.raises(UnsupportedModel, match=reason):
        read_layer("mxfp4", {}, tensors | change)
