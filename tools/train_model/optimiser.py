"""Muon for the layers' matrices, AdamW for the embedding and the norms.

Muon (Jordan et al. 2024) steps along the orthogonalised momentum of a matrix's gradient.  Matrices
of one shape are orthogonalised together.
"""

from typing import Any

import torch
from torch import Tensor

from tools.train_model.model import LanguageModel

NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Push the singular values of each of ``matrices [N, rows, columns]`` towards 1."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.mT if is_tall else x).float()
    return result


class MuonAdamW:
    """Both optimisers behind one ``step``; rates are multiplied by the schedule's scale."""

    def __init__(
        self,
        model: LanguageModel,
        muon_rate: float = 0.01,
        adam_rate: float = 3e-3,
        weight_decay: float = 0.02,
    ) -> None:
        self.muon_rate, self.adam_rate, self.weight_decay = muon_rate, adam_rate, weight_decay
        self.steps = 0
        self._groups: dict[str, list[Tensor]] = {}
        others: list[Tensor] = []
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed_tokens" not in name:
                shape = "x".join(str(size) for size in parameter.shape)
                self._groups.setdefault(shape, []).append(parameter)
            else:
                others.append(parameter)
        self._momentum = {
            shape: torch.zeros(len(group), *group[0].shape, device=group[0].device)
            for shape, group in self._groups.items()
        }
        self._adam = torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Update the parameters from their gradients at ``scale`` times the rates, and clear."""
        blend = 0.95 if self.steps > 100 else 0.85 + 0.1 * self.steps / 100
        for shape, group in self._groups.items():
            gradients = torch.stack([p.grad for p in group if p.grad is not None])
            momentum = self._momentum[shape].lerp_(gradients, 1 - blend)
            updates = orthogonalise(gradients.lerp(momentum, blend))
            rows, columns = group[0].shape
            updates *= max(1.0, rows / columns) ** 0.5
            for parameter, update in zip(group, updates, strict=True):
                parameter.mul_(1 - self.muon_rate * scale * self.weight_decay)
                parameter.add_(update, alpha=-self.muon_rate * scale)
                parameter.grad = None
        for settings in self._adam.param_groups:
            settings["lr"] = self.adam_rate * scale
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on as if never interrupted."""
        return {"steps": self.steps, "momentum": self._momentum, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a ``state_dict``."""
        self.steps = state["steps"]
        for shape, momentum in state["momentum"].items():
            self._momentum[shape].copy_(momentum)
        self._adam.load_state_dict(state["adam"])
