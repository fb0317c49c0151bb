"""A quantised weight as integer codes with scales, whatever format it was stored in."""

from __future__ import annotations

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
        return self.values.shape[1]

    @property
    def outputs(self) -> int:
        return self.values.shape[0]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.inputs // self.scales.shape[1]

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """Return [outputs, inputs], computed in float32 and rounded once."""
        wide = self.values.float().view(self.outputs, -1, self.group)
        if self.offsets is not None:
            wide -= self.offsets.float()[:, :, None]
        return (wide * self.scales.float()[:, :, None]).view(self.values.shape).to(dtype)


def codes_of(module: torch.nn.Module) -> Codes | None:
    """Return what :func:`attach` gave to ``module``."""
    found = getattr(module, "codes", None)
    return found if isinstance(found, Codes) else None


def attach(module: torch.nn.Module, codes: Codes) -> None:
    """Give ``codes`` to ``module``, whose weight is what they say, for a forward that computes with them."""
    module.codes = codes  # type: ignore[assignment]


def detach_all(model: torch.nn.Module) -> None:
    """Let go of all codes of ``model``, which goes on with its weights."""
    for module in model.modules():
        if codes_of(module) is not None:
            del module.codes
