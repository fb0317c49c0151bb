"""LoRA adapters beside the base model: which rows of a step get which low-rank terms, and the terms themselves.

The base model's linear layers compute all rows, of all adapters, and a hook adds ``scale * B(A(x))`` to the rows
of each adapter (the batches of Punica, Chen et al. 2024, and S-LoRA, Sheng et al. 2024, without their kernels). Rows
without an adapter are not touched. A and B are kept and applied in float32, as PEFT does, whatever the model's type;
on a CPU they are packed like the model's own layers, so that a row's result does not depend on the other rows.

Hooks are there only on layers that some loaded adapter adapts, and do nothing in a step without adapters. The fused
forward of CPUs calls no modules: its kernels add the terms to the sums that they have
(:mod:`services.worker.engine.fused.terms`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from services.worker.engine.attention import attending
from services.worker.engine.forward_meta import Segment
from services.worker.engine.fused.strips import StripLinear
from services.worker.engine.model_faults import in_one_line
from services.worker.engine.packed_linear import PackedLinear, is_packable
from services.worker.engine.probe import LayoutProbe
from shared.adapters import AdaptedModule, AdapterFiles, tensor_names
from shared.errors import AdapterRefused, InvariantViolated

_LINEAR = (torch.nn.Linear, PackedLinear, StripLinear)

_PROBE_ROWS = 3


@dataclass(frozen=True, slots=True)
class LowRankWeights:
    """A [rank, inputs] and B [outputs, rank] of one layer, float32."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's term in one layer, ``scale * b(a(x))``, where the model's own module computes the layer."""

    a: Callable[[torch.Tensor], torch.Tensor]
    b: Callable[[torch.Tensor], torch.Tensor]
    scale: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the term of x [rows, inputs] of any type, float32 [rows, outputs]."""
        return self.b(self.a(x.float())) * self.scale


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """An adapter in memory, by the names of modules in the model.

    One of the two is filled: ``weights`` for a fused forward, ``terms`` for hooks on the model's modules.
    """

    digest: str
    modules: tuple[str, ...]
    weights: Mapping[str, LowRankWeights]
    terms: Mapping[str, LowRank]


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Rows of one step that belong to one adapter, int64 on the model's device."""

    rows: torch.Tensor
    adapter: Adapter


_STEP: ContextVar[Sequence[AdapterRows]] = ContextVar("adapter_rows", default=())


class Adapters:
    """The adapters of one model. All methods but :meth:`prepare` are for the compute thread."""

    def __init__(self, model: Any, device: torch.device, *, are_fused: bool = False, refusal: str = "") -> None:
        """Serve adapters by hooks on modules, or without any if ``are_fused``: a fused forward adds the terms.

        ``refusal`` says why adapters are refused, where steps of this model do not call its modules with all rows at
        once; "" where they do.
        """
        self._model, self._device, self.are_fused, self._refusal = model, device, are_fused, refusal
        self._loaded: dict[str, Adapter] = {}
        self._hooks: dict[str, Any] = {}  # By module, the handle that removes its hook.

    def __contains__(self, digest: str) -> bool:
        """Return whether the adapter with this ``digest`` is loaded."""
        return digest in self._loaded

    @property
    def hooks(self) -> int:
        """Number of hooks on the model's modules, which do nothing in steps without rows of an adapter."""
        return len(self._hooks)

    def prepare(self, files: AdapterFiles, tensors: Mapping[str, torch.Tensor]) -> Adapter:
        """Convert an adapter's weights into the form that steps read; from any thread.

        Raises AdapterRefused where it does not fit the model.
        """
        if self._refusal:
            raise AdapterRefused(f"adapters of this model are not served yet: {self._refusal}")
        weights = {module.name: self._weights(module, tensors) for module in files.modules}
        if self.are_fused:
            return Adapter(files.digest, tuple(weights), weights, {})
        terms = {name: LowRank(_linear(each.a), _linear(each.b), each.scale) for name, each in weights.items()}
        return Adapter(files.digest, tuple(weights), {}, terms)

    def put(self, adapter: Adapter) -> None:
        """Serve an adapter from now on.

        Raises AdapterRefused, and does not serve it, where the model calls one of its layers otherwise than once a step
        with all rows in order: the rows of a request could not be found.
        """
        self._check_calls(adapter)
        self._loaded[adapter.digest] = adapter
        for name in adapter.terms:
            if name not in self._hooks:
                module = self._model.get_submodule(name)
                self._hooks[name] = module.register_forward_hook(_adding(name))

    def drop(self, digest: str) -> None:
        """Forget an adapter; no later step has rows of it."""
        gone = self._loaded.pop(digest, None)
        if gone is None:
            return
        needed = {name for adapter in self._loaded.values() for name in adapter.terms}
        for name in [name for name in gone.terms if name not in needed]:
            self._hooks.pop(name).remove()

    def rows_of(self, segments: Sequence[Segment]) -> list[AdapterRows]:
        """Return the rows of each adapter in a step; empty where all rows are the base model's.

        Raises InvariantViolated for an adapter that is not loaded.
        """
        if not any(segment.adapter for segment in segments):  # Nearly every step.
            return []
        found: dict[str, list[int]] = {}
        first = 0
        for segment in segments:
            if segment.adapter:
                found.setdefault(segment.adapter, []).extend(range(first, first + segment.rows))
            first += segment.rows
        missing = [digest for digest in found if digest not in self._loaded]
        if missing:
            raise InvariantViolated(f"adapter {missing[0]} is not loaded")
        return [
            AdapterRows(torch.tensor(rows, dtype=torch.int64, device=self._device), self._loaded[digest])
            for digest, rows in found.items()
        ]

    def _weights(self, module: AdaptedModule, tensors: Mapping[str, torch.Tensor]) -> LowRankWeights:
        try:
            linear = self._model.get_submodule(module.name)
        except AttributeError as error:
            raise AdapterRefused(f"the model has no {module.name}") from error
        if type(linear) not in _LINEAR:
            raise AdapterRefused(f"{module.name} is a {type(linear).__name__}, and only linear layers are adapted")
        if (linear.in_features, linear.out_features) != (module.inputs, module.outputs):
            raise AdapterRefused(
                f"{module.name} takes {linear.in_features} numbers and gives {linear.out_features}, the adapter's "
                f"{module.inputs} and {module.outputs}"
            )
        a, b = (tensors[name].to(self._device, torch.float32) for name in tensor_names(module.name))
        if not bool(torch.isfinite(a).all()) or not bool(torch.isfinite(b).all()):
            raise AdapterRefused(f"weights of {module.name} are not finite")
        return LowRankWeights(a, b, module.scale)

    @torch.inference_mode()
    def _check_calls(self, adapter: Adapter) -> None:
        calls: dict[str, list[tuple[int, ...]]] = {name: [] for name in adapter.modules}
        hooks = [
            self._model.get_submodule(name).register_forward_pre_hook(_noting(calls[name])) for name in adapter.modules
        ]
        try:
            rows = torch.arange(1, _PROBE_ROWS + 1, device=self._device)[None]
            with attending(LayoutProbe()):
                last = torch.tensor([_PROBE_ROWS - 1], device=self._device)
                self._model(input_ids=rows, position_ids=rows - 1, use_cache=False, logits_to_keep=last)
        except Exception as error:  # Of the model's own code.
            raise AdapterRefused(f"the model fails in a trial: {in_one_line(error)}") from error
        finally:
            for hook in hooks:
                hook.remove()
        for name, shapes in calls.items():
            if shapes != [(1, _PROBE_ROWS, self._model.get_submodule(name).in_features)]:
                raise AdapterRefused(f"{name} is not called once for all tokens in order, so it cannot be adapted")


@contextmanager
def adapting(step: Sequence[AdapterRows]) -> Iterator[None]:
    """Add to these rows what their adapters add, in all models that this thread runs within the block."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def _adding(name: str) -> Callable[[Any, tuple[torch.Tensor, ...], torch.Tensor], None]:
    """Return the hook of a module. It adds to the module's output in place, before anything else reads it."""

    def add(_module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        for part in _STEP.get():
            term = part.adapter.terms.get(name)
            if term is not None:
                x, y = inputs[0][0], output[0]
                # The sum is rounded once to the model's type, as in PEFT.
                y[part.rows] = (y[part.rows] + term(x[part.rows])).to(y.dtype)

    return add


def _noting(calls: list[tuple[int, ...]]) -> Callable[[Any, tuple[torch.Tensor, ...]], None]:
    def note(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        calls.append(tuple(inputs[0].shape))

    return note


def _linear(weight: torch.Tensor) -> torch.nn.Module:
    """Return the linear layer without bias that has this weight, float32 [outputs, inputs]."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    return PackedLinear(linear) if is_packable(weight) else linear
