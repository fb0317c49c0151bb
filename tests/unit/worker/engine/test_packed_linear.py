"""Linear layers in oneDNN's layout: few sizes of batches, and the same results in each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.worker.engine import packed_linear
from services.worker.engine.packed_linear import (
    PackedLinear,
    conversion,
    pack_linears,
    pack_read_linears,
    padded_rows,
)

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN packs for CPUs only")  # type: ignore[no-untyped-call]


def test_sizes_are_few_and_little_is_added() -> None:
    """All of five shapes in all sizes have room in oneDNN's cache of 1,024, and long prefills stay as fast."""
    padded = {rows: padded_rows(rows) for rows in range(1, 8193)}

    assert len(set(padded.values())) <= 1024 // 5
    assert all(0 <= more - rows <= max(3, rows / 16) for rows, more in padded.items())
    assert all(padded_rows(more) == more for more in padded.values())


def test_only_padded_sizes_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other number of rows would have a primitive of its own, which is kept."""
    layer = PackedLinear(torch.nn.Linear(16, 8))
    compute: Any = torch.ops.mkldnn._linear_pointwise
    sizes: set[int] = set()

    def watched(x: torch.Tensor, *rest: object) -> torch.Tensor:
        sizes.add(len(x))
        result: torch.Tensor = compute(x, *rest)
        return result

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", watched)
    with torch.inference_mode():
        for rows in range(1, 257):
            assert layer(torch.zeros(rows, 16)).shape == (rows, 8)

    assert sizes == {padded_rows(rows) for rows in range(1, 257)}


@pytest.mark.parametrize("rows", [1, 3, 5, 31, 65, 100, 129, 250, 517])
def test_a_row_has_the_same_bits_in_every_batch(rows: int) -> None:
    """However many rows surround it, and however much padding."""
    torch.manual_seed(rows)
    linear = torch.nn.Linear(192, 512)
    layer = PackedLinear(linear)
    x = torch.randn(rows, 192)

    with torch.inference_mode():
        alone = layer(x)
        among_others = layer(torch.cat([x, torch.randn(3 * rows + 1, 192)]))[:rows]
        expected = linear(x)

    assert torch.equal(alone, among_others)
    torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-5)


class Router(torch.nn.Module):
    """Multiplies by one weight itself, and calls the other layer."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier, self.after = torch.nn.Linear(16, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 16] to [T, 4]."""
        result: torch.Tensor = self.after(torch.nn.functional.linear(x.float(), self.classifier.weight.float()))
        return result


def test_a_layer_whose_weight_others_read_keeps_it() -> None:
    """The weight of a packed layer is no more than a shape, so a router would choose by nothing."""
    model = torch.nn.Sequential(Router())
    x = torch.randn(5, 16)
    with torch.inference_mode():
        expected = model(x)

        assert pack_linears(model) == 1
        torch.testing.assert_close(model(x), expected)


class Called(torch.nn.Module):
    """Calls a layer whose weight it reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 16] to [T, 8]."""
        result: torch.Tensor = self.dense(x) + x @ self.dense.weight.T
        return result


def test_a_weight_that_is_read_beside_calls_is_unpacked_for_it() -> None:
    """Where that is wanted; a layer that is read alone keeps its weight."""
    model = torch.nn.ModuleList([Called(), Router()])
    x = torch.randn(5, 16)
    with torch.inference_mode():
        expected = [each(x) for each in model]
        pack_linears(model)
        pack_read_linears(model)

        for each, wanted in zip(model, expected, strict=True):
            torch.testing.assert_close(each(x), wanted)
    assert isinstance(model[0].dense, PackedLinear)
    assert type(model[1].classifier) is torch.nn.Linear


class Products(torch.nn.Linear):
    """Another way to compute the same, as Falcon has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, out]."""
        return x @ self.weight.T + self.bias


class Halves(torch.nn.Linear):
    """Something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, out]."""
        return super().forward(x) / 2


class Pairs(torch.nn.Linear):
    """Something that takes no rows alone."""

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """[T, in] twice to [T, out]."""
        return super().forward(x + other)


def test_derived_layers_are_packed_where_they_compute_the_product() -> None:
    """Whatever they are called."""
    model = torch.nn.ModuleList([Products(16, 8), Halves(16, 8), Pairs(16, 8)])
    x = torch.randn(5, 16)
    with torch.inference_mode():
        expected = model[0](x)

        assert pack_linears(model) == 1
        torch.testing.assert_close(model[0](x), expected)
    assert [type(each) for each in model] == [PackedLinear, Halves, Pairs]


def test_a_type_that_is_computed_by_conversion_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do about it; where the processor has its instructions, or no library computes, nothing is."""
    monkeypatch.setattr(packed_linear, "packed_dtypes", lambda: {torch.float32})
    assert "--dtype float32" in conversion(torch.bfloat16)
    assert conversion(torch.float32) == ""

    for dtypes in ({torch.float32, torch.bfloat16}, set[torch.dtype]()):
        monkeypatch.setattr(packed_linear, "packed_dtypes", lambda dtypes=dtypes: dtypes)
        assert conversion(torch.bfloat16) == ""
