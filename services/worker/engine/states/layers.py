"""Finding the modules of a model that carry states, by handing each a recording cache; and how a step calls them.

The library's state layers take their cache as an argument, so a module carries states if it asks such a cache for one.
Of nested modules the outermost one that does so is called piece by piece. The number, shapes and data types of a
module's states are those that it leaves in the cache. Some modules go on from a state with one token only and forget it
where there are more (Mamba's), or mix sequences up (RWKV's): each is tested for that, and such modules are called token
by token, or sequence by sequence.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from services.worker.engine.attention import AttentionStep, attending
from services.worker.engine.cache_argument import cache_argument
from services.worker.engine.states.accesses import Access, InCache, own_access
from services.worker.engine.states.carried import CarriedStates, StatePart, States, parts_of
from services.worker.engine.states.going_on import Arguments, Call, each_alone, goes_on, keeps_apart, one_by_one
from shared.errors import UnsupportedModel

STATE_LAYER_TYPES = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
"""Layer types, in the library's words, of layers that carry a state: instead of K and V or (hybrid) beside them."""

WITHOUT_ATTENTION = ("linear_attention", "conv", "mlp", "moe")
"""Layer types of layers that have no heads of K and V."""


@dataclass(frozen=True, slots=True)
class StateModule:
    """A module that carries states, in model layer ``layer``; ``parts`` describe them.

    In a plane map they are its entry ``entry``, in a slot its bytes from ``first`` on.
    """

    name: str
    layer: int
    entry: int
    parts: tuple[StatePart, ...]
    first: int
    call: Call

    @property
    def nbytes(self) -> int:
        """Bytes of all its states for one sequence."""
        return sum(part.nbytes for part in self.parts)

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the module's part of ``slots`` (uint8 [slots, bytes of all modules]), a view."""
        return slots[:, self.first : self.first + self.nbytes]


class StatefulStep(Protocol):
    """One forward pass, as modules with states see it."""

    def carry(self, module: StateModule, arguments: Arguments) -> Any:
        """Return the output of ``module`` for all rows, called with ``arguments``, whose tensors are [1, T, ...]."""


_STEP: ContextVar[StatefulStep | None] = ContextVar("stateful_step", default=None)


@contextmanager
def carrying(step: StatefulStep) -> Iterator[None]:
    """Have ``step`` compute modules with states within the block. Outside of one every sequence begins."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def state_layers(config: Any) -> list[int]:
    """Return the layers that carry a state, by the configuration's layer types."""
    kinds = getattr(config, "layer_types", None) or ()
    return [layer for layer, kind in enumerate(kinds) if kind in STATE_LAYER_TYPES]


def layers_with_attention(config: Any, layers: int) -> list[int]:
    """Return those of ``layers`` layers that attend, by the configuration's layer types; all where it names none."""
    kinds = getattr(config, "layer_types", None)
    return [layer for layer in range(layers) if kinds is None or kinds[layer] not in WITHOUT_ATTENTION]


@torch.inference_mode()
def find_state_modules(model: Any, step: AttentionStep) -> tuple[StateModule, ...]:
    """Run two tokens through ``model``, and from then on have steps compute its modules with states.

    Attention of the two tokens is by ``step``. Raises UnsupportedModel for a layer that should carry a state and asks
    for none, and for one that takes rows in a way that cannot be cut into pieces.
    """
    expected = state_layers(model.config)
    if not expected:
        return ()
    seams = [_Seam(name, module) for name, module in model.named_modules() if _takes_states(module)]
    _run(model, seams, step)
    found = [seam for seam in seams if seam.carries]
    outermost = [seam for seam in found if not any(seam.name.startswith(f"{other.name}.") for other in found)]
    missing = set(expected) - {seam.layer for seam in outermost}
    if missing:
        raise UnsupportedModel(
            f"layer {min(missing)} of {model.config.model_type} should carry a state and asked no cache for one"
        )
    behind = len(model.config.layer_types)
    free = set(range(behind)) - set(layers_with_attention(model.config, behind))
    modules: list[StateModule] = []
    for seam in outermost:
        # A plane map has an entry for each layer, and further ones for states that layers keep beside K and V.
        entry = seam.layer if seam.layer in free else behind
        free.discard(entry)
        behind += entry == behind
        first = modules[-1].first + modules[-1].nbytes if modules else 0
        modules.append(seam.hand_over(entry, first))
    return tuple(modules)


class _Notes(CarriedStates):
    """A cache for one call of one module that records whether it is asked for states, and keeps no K and V."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        self.asked = True
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        self.asked = True
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.asked = True
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.asked = True
        return super().update_recurrent_state(*args, **kwargs)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new K and V alone, as without a cache."""
        return key_states, value_states

    def update_indexer(self, indexer_key_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return the new index keys alone."""
        return indexer_key_states

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys and the first one's position, as without a cache."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the number of earlier keys: none."""
        return 0


class _Seam:
    """A module of the search, whose ``forward`` is replaced."""

    def __init__(self, name: str, module: Any) -> None:
        self.name = name
        self._module = module
        self._forward = module.forward
        self._signature = inspect.signature(module.forward)
        self._own = own_access(module)
        self._notes = _Notes()
        self._arguments: dict[str, Any] = {}  # Those of the search, whose tensors are [1, 2, ...].

    @property
    def carries(self) -> bool:
        """Whether the module was called, and has states as far as it was seen."""
        return bool(self._arguments) and (self._own is not None or self._notes.asked)

    @property
    def layer(self) -> int:
        """The model layer that the module belongs to."""
        index = getattr(self._module, "layer_idx", None)
        numbers = re.findall(r"\d+", self.name)
        return int(numbers[0]) if index is None and numbers else int(-1 if index is None else index)

    def listen(self) -> None:
        """Replace the module's cache by a recording one."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            bound = self._signature.bind(*args, **kwargs)
            self._arguments = dict(bound.arguments)
            if self._own is None:
                bound.arguments[cache_argument(self._forward)] = self._notes
            return self._forward(*bound.args, **bound.kwargs)

        self._module.forward = forward

    def restore(self) -> None:
        """Restore the module as it was."""
        self._module.forward = self._forward

    def hand_over(self, entry: int, first: int) -> StateModule:
        """Have steps compute the module, see :func:`carrying`. Raises UnsupportedModel where that cannot be."""
        odd = [name for name, value in self._arguments.items() if not _has_rows(value)]
        if odd:
            raise UnsupportedModel(f"{self.name} carries a state and takes {', '.join(odd)}, which has no rows")
        access = self._own or InCache(cache_argument(self._forward))
        whole = partial(_call, self._forward, self._signature, access)
        _, left = whole(self._arguments, None)
        call: Call = whole if keeps_apart(whole, self._arguments, left) else each_alone(whole)
        call = call if goes_on(call, self._arguments, left) else one_by_one(call)
        module = StateModule(self.name, self.layer, entry, parts_of(left), first, call)

        def forward(*args: Any, **kwargs: Any) -> Any:
            step = _STEP.get()
            if step is None:
                return self._forward(*args, **kwargs)
            return step.carry(module, self._signature.bind(*args, **kwargs).arguments)

        self._module.forward = forward
        return module


def _call(
    forward: Callable[..., Any],
    signature: inspect.Signature,
    access: Access,
    arguments: Arguments,
    states: States | None,
) -> tuple[Any, States]:
    given = access.hand_in(arguments, states)
    bound = inspect.BoundArguments(signature, given)
    output = forward(*bound.args, **bound.kwargs)
    return output, access.take_out(given, output)


def _takes_states(module: Any) -> bool:
    """Return whether ``module`` is one within a model, not a whole one, and is given a cache or states."""
    if isinstance(module, PreTrainedModel):
        return False
    return own_access(module) is not None or bool(cache_argument(module.forward))


def _has_rows(value: Any) -> bool:
    """Return whether every tensor in ``value`` is ``[1, T, ...]``, of the two tokens of the search."""
    if isinstance(value, torch.Tensor):
        return value.ndim >= 2 and tuple(value.shape[:2]) == (1, 2)
    if isinstance(value, dict):
        return all(map(_has_rows, value.values()))
    return all(map(_has_rows, value)) if isinstance(value, tuple | list) else True


def _run(model: Any, seams: list[_Seam], step: AttentionStep) -> None:
    for seam in seams:
        seam.listen()
    try:
        with attending(step):
            model(
                input_ids=torch.tensor([[1, 2]], device=model.device),
                position_ids=torch.tensor([[0, 1]], device=model.device),
                use_cache=False,
            )
    finally:
        for seam in seams:
            seam.restore()
