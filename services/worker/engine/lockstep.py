"""Several calls of a model in lockstep: layers with most weights compute the rows of all calls together.

Each call runs in a fibre of its own (a greenlet) as if it were alone, with its own masks, positions and cache. Where it
reaches a *joined* layer, it waits for the others there, the layer computes all their rows at once, and each call goes
on with its own. So a step reads those weights once, whatever code lies between the layers. Joined are modules whose
result for a row does not depend on other rows (``computes_rows_alone``), so a call gets the bits that it gets alone.

Calls need not meet at every layer: where some skip one, that of the layers waited for that comes first in the model is
computed first, so those behind catch up. What all calls hold between two layers is in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar, copy_context
from typing import Any, Generic, TypeVar

import torch
from greenlet import getcurrent, greenlet

Result = TypeVar("Result")

MARK = "computes_rows_alone"
"""Name of the attribute of modules that are joined. Their arguments and their result are tensors ``[..., n]``."""


class JoinedLayer:
    """The ``forward`` of a module that computes the rows of several calls together."""

    def __init__(self, number: int, forward: Callable[..., torch.Tensor]) -> None:
        """Compute by ``forward``; ``number`` is the module's place in the model."""
        self.number, self._forward = number, forward

    def __call__(self, *inputs: torch.Tensor, **named: Any) -> torch.Tensor:
        """Return what the module computes for ``inputs``, together with calls in lockstep if this is one of them."""
        fibre = _FIBRE.get()
        if fibre is None or named or not inputs[0].numel():
            return self._forward(*inputs, **named)
        return fibre.wait(self, inputs)

    def together(self, calls: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the result for each of ``calls``, from one pass over all their rows."""
        rows = [[each.reshape(-1, each.shape[-1]) for each in inputs] for inputs in calls]
        found = self._forward(*(torch.cat(each) for each in zip(*rows, strict=True)))
        parts = torch.split(found, [len(inputs[0]) for inputs in rows])
        return [part.view(*inputs[0].shape[:-1], part.shape[-1]) for part, inputs in zip(parts, calls, strict=True)]


class _Fibre(Generic[Result]):
    """One call of several. After :meth:`resume` it waits for ``layer`` with ``inputs``, or has a ``result``."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self.layer: JoinedLayer | None = None
        self.inputs: Sequence[torch.Tensor] = ()
        self.result: Result | None = None
        self._hub = getcurrent()
        self._greenlet = greenlet(self._run)
        self._greenlet.gr_context = copy_context()
        self._call = call

    def _run(self, _: None) -> None:
        _FIBRE.set(self)
        self.result = self._call()
        self.layer, self.inputs = None, ()

    def wait(self, layer: JoinedLayer, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return this call's rows once the layer is computed; called within the fibre."""
        self.layer, self.inputs = layer, inputs
        found: torch.Tensor = self._hub.switch()
        return found

    def resume(self, found: torch.Tensor | None) -> None:
        """Go on with what the layer gave. Raises whatever the call raises."""
        self._greenlet.switch(found)

    def end(self) -> None:
        """Leave the call where it is, if it has not ended."""
        if self._greenlet:
            self._greenlet.throw()


_FIBRE: ContextVar[_Fibre[Any] | None] = ContextVar("fibre", default=None)


def join_layers(model: Any) -> None:
    """Have the modules of ``model`` that are marked compute rows of calls in lockstep together; the outermost of each.

    Plain linear layers on other devices than CPUs are joined, too, and the library's experts there: a GPU's kernels
    round by the number of rows, as in steps of all models.
    """
    inside = ""
    for number, (name, module) in enumerate(model.named_modules()):
        if inside and name.startswith(inside):
            continue
        if _is_joined(module):
            inside = f"{name}."
            if not isinstance(module.forward, JoinedLayer):
                module.forward = JoinedLayer(number, module.forward)


def _is_joined(module: Any) -> bool:
    if getattr(module, MARK, False):
        return True
    weight = next(module.parameters(recurse=False), None)
    if weight is None or weight.device.type == "cpu":
        return False
    return type(module) is torch.nn.Linear or hasattr(module, "has_gate")


def in_lockstep(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Return the results of ``calls``, made in lockstep. Raises what the first of them raises; the others then end."""
    if len(calls) == 1:
        return [calls[0]()]
    fibres = [_Fibre(call) for call in calls]
    try:
        for each in fibres:
            each.resume(None)
        while waiting := [each for each in fibres if each.layer is not None]:
            layer = min((each.layer for each in waiting if each.layer is not None), key=lambda each: each.number)
            met = [each for each in waiting if each.layer is layer]
            for each, found in zip(met, layer.together([each.inputs for each in met]), strict=True):
                each.resume(found)
    finally:
        for each in fibres:
            each.end()
    return [each.result for each in fibres]  # type: ignore[misc]
