"""A quantised weight as integer codes with scales, whatever format it was stored in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Codes:
    """The weight [outputs, inputs] that is ``scales * (values - offsets)``, by groups of neighbouring inputs.

    values int8 [outputs, inputs], of ``bits`` bits with a sign; scales [outputs, groups], of the type that they were
    stored in; offsets int8 [outputs, groups], None where all are zero.
    """

    bits: int
    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None

    @property
    def inputs(self) -> int:
        """Number of inputs, the weight's second dimension."""
        return self.values.shape[1]

    @property
    def outputs(self) -> int:
        """Number of outputs, the weight's first dimension."""
        return self.values.shape[0]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.inputs // self.scales.shape[1]

    def rows(self, parts: Sequence[range]) -> Codes:
        """Return the codes of these ``parts`` of the outputs, one after the other."""
        taken = [
            None if each is None else torch.cat([each[part.start : part.stop] for part in parts])
            for each in (self.values, self.scales, self.offsets)
        ]
        return Codes(self.bits, *taken)  # type: ignore[arg-type]

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [outputs, inputs], computed in float32 and rounded once to ``dtype``."""
        wide = self.values.float().view(self.outputs, -1, self.group)
        if self.offsets is not None:
            wide -= self.offsets.float()[:, :, None]
        return (wide * self.scales.float()[:, :, None]).view(self.values.shape).to(dtype)


def codes_of(module: torch.nn.Module) -> Codes | None:
    """Return the codes that :func:`attach` gave to ``module``; None where it has none."""
    found = getattr(module, "codes", None)
    return found if isinstance(found, Codes) else None


def attach(module: torch.nn.Module, codes: Codes) -> None:
    """Attach ``codes``, which its weight was computed from, to ``module``, for a forward that computes with them."""
    module.codes = codes  # type: ignore[assignment]


def detach_all(model: torch.nn.Module) -> None:
    """Drop all codes of ``model``, which keeps its weights."""
    for module in model.modules():
        if codes_of(module) is not None:
            del module.codes
