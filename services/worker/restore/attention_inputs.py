"""Access to the inputs of attention as a step computes them: hidden states, already normed (HCache section 3.1).

Hooks exist only inside :meth:`AttentionInputs.given_to`, so a step that saves nothing costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from services.worker.restore.refusals import HiddenStatesUnsupported


class HiddenSink(Protocol):
    """Receiver of the inputs of attention, in order of the layers."""

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        """Take ``hidden`` [T, hidden] of all rows of the step in one layer. Must not raise or wait.

        It is the model's own memory: all reads of it are either done when this returns or ordered before later work of
        the current stream.
        """


class AttentionInputs:
    """The attention modules of one model, in order of their layers."""

    def __init__(self, model: Any, layers: int) -> None:
        """Find the modules. Raises HiddenStatesUnsupported unless each of ``layers`` layers has one."""
        self.modules = _attention_modules(model, layers)

    @contextmanager
    def given_to(self, sink: HiddenSink, layers: Sequence[int] | None = None) -> Iterator[None]:
        """Give the inputs of ``layers`` (by default all) in every forward pass within this block to ``sink``."""
        wanted = range(len(self.modules)) if layers is None else layers
        handles = [
            self.modules[layer].register_forward_pre_hook(_giver(sink, layer), with_kwargs=True) for layer in wanted
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the hidden states in a call of an attention module, ``[1, T, hidden]``."""
    return args[0] if args else kwargs["hidden_states"]


def _giver(sink: HiddenSink, layer: int) -> Any:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sink.take(layer, input_of(args, kwargs)[0])

    return hook


def _attention_modules(model: Any, layers: int) -> tuple[torch.nn.Module, ...]:
    found: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        if type(module).__name__.endswith("Attention") and isinstance(getattr(module, "layer_idx", None), int):
            found.setdefault(module.layer_idx, []).append(module)
    if sorted(found) != list(range(layers)) or any(len(modules) != 1 for modules in found.values()):
        raise HiddenStatesUnsupported(
            f"{type(model).__name__} has {layers} layers, but attention modules for layers {sorted(found)}"
        )
    return tuple(found[layer][0] for layer in range(layers))
