"""From hidden states of a layer to its KV: the model's own K and V projections, norms and RoPE (HCache section 3.1).

The layer's attention module itself is called, up to the point where it hands K and V to attention, so biases, a K norm
or scaled positions need no code of ours and the same kernels compute the same bits. Queries are not computed: a
stand-in for their projection returns zeros. It is proven once per model that KV follows from hidden states and
positions alone.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from services.worker.engine.attention import AttentionCall, attending
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.probe import HARMLESS_EXTRAS, LayoutProbe
from services.worker.kv.device_pool import DTYPE_NAMES
from services.worker.restore.attention_inputs import AttentionInputs, input_of
from services.worker.restore.hidden_shape import HiddenShape
from services.worker.restore.kv_slots import KvSlots
from services.worker.restore.refusals import HiddenStatesUnsupported

BLOCK_ROWS = 1024
"""Rows projected at once on a CPU: K and V of a block are written to the pool while they are still in the cache."""

_PROOF_ROWS = 16
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest deviation of proven KV, relative to the largest value.

Kernels for other shapes may round differently, while a wrong position or a forgotten bias gives values near 1.
"""

Emit = Callable[[AttentionCall], None]


class _Projected(Exception):
    """Ends an attention module's forward once K and V are known."""


class _Taking:
    """An attention step that takes K and V and ends the module's forward."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self._emit(call)
        raise _Projected


class _NoQueries(torch.nn.Module):
    """Stand-in for ``q_proj``: zeros of its shape, which take no memory and no time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return zeros [..., width] for [..., hidden]."""
        return hidden.new_zeros(()).expand(*hidden.shape[:-1], self._width)


class KvProjection:
    """The K and V projections of every layer of a runner's model. Used by the thread that computes."""

    def __init__(self, runner: ModelRunner) -> None:
        """Find the projection.

        Raises HiddenStatesUnsupported, with the reason, when KV does not follow from hidden states exactly.
        """
        if runner.attends_itself:
            raise HiddenStatesUnsupported(f"{type(runner.model).__name__} attends by code of its own")
        if not runner.pool.planes.is_identity:
            raise HiddenStatesUnsupported(f"pages hold {runner.pool.planes.contents}, which nothing restores")
        if runner.geometry.is_rounded:
            raise HiddenStatesUnsupported(
                "pages hold K and V rounded to eight bits, which load faster than they restore"
            )
        self._pool = runner.pool
        self.inputs = AttentionInputs(runner.model, runner.geometry.layers)
        self._rotary = getattr(runner.model.base_model, "rotary_emb", None)
        self._modules: list[torch.nn.Module] = []
        self._kwargs: list[dict[str, Any]] = []
        self.shape = self._prove(runner)

    @torch.inference_mode()
    def position_embeddings(self, positions: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """Return the model's position embeddings for ``positions`` (int64 [T]), as attention gets them.

        None if the model adds positions before its layers.
        """
        if not any("position_embeddings" in kwargs for kwargs in self._kwargs):
            return None
        assert self._rotary is not None
        like = torch.empty(0, dtype=self.shape.torch_dtype, device=self._pool.device)
        return tuple(self._rotary(like, positions[None].to(self._pool.device)))

    @torch.inference_mode()
    def restore(
        self, layer: int, hidden: torch.Tensor, embeddings: tuple[torch.Tensor, ...] | None, slots: KvSlots
    ) -> None:
        """Write the KV of ``layer`` for hidden states [T, hidden] at the positions of ``embeddings`` into ``slots``."""
        step = BLOCK_ROWS if hidden.device.type == "cpu" else len(hidden)
        for start in range(0, len(hidden), step):
            part = slice(start, start + step)
            at = None if embeddings is None else tuple(each[:, part] for each in embeddings)

            def write(call: AttentionCall, start: int = start) -> None:
                slots.write(self._pool, call.layer, call.key, call.value, start)

            self._project(layer, hidden[part], at, write)

    def _project(
        self, layer: int, hidden: torch.Tensor, embeddings: tuple[torch.Tensor, ...] | None, emit: Emit
    ) -> None:
        kwargs = self._kwargs[layer]
        if "position_embeddings" in kwargs:
            kwargs = {**kwargs, "position_embeddings": embeddings}
        try:
            with attending(_Taking(emit)):
                self._modules[layer](hidden[None], **kwargs)
        except _Projected:
            return
        raise HiddenStatesUnsupported(f"layer {layer} does not go through the attention interface")

    @torch.inference_mode()
    def _prove(self, runner: ModelRunner) -> HiddenShape:
        """Compare K and V of a pass with those projected from its hidden states, at positions out of order."""
        name, layers = type(runner.model).__name__, runner.geometry.layers
        rows = min(_PROOF_ROWS, runner.max_context - 1)
        positions = torch.arange(rows, 0, -1) * ((runner.max_context - 1) // rows)
        ids = torch.arange(rows) * 7919 % runner.vocab_size
        calls, probe = _Calls(), LayoutProbe()
        handles = [module.register_forward_pre_hook(calls, with_kwargs=True) for module in self.inputs.modules]
        try:
            runner.run(ids, positions, probe, torch.empty(0, dtype=torch.int64))
        finally:
            for handle in handles:
                handle.remove()
        if len(calls.hidden) != layers or len(probe.calls) != layers:
            raise HiddenStatesUnsupported(f"{name} calls {len(calls.hidden)} attention modules in {layers} layers")
        self._kwargs = [_settings(kwargs, name) for kwargs in calls.kwargs]
        self._modules = [
            # RoPE is applied to queries as well; where they are shaped by its dimension, one head of zeros will do.
            _without_queries(module, runner.geometry.head_dim if "position_embeddings" in kwargs else None)
            for module, kwargs in zip(self.inputs.modules, self._kwargs, strict=True)
        ]
        self.shape = HiddenShape(layers, calls.hidden[0].shape[-1], DTYPE_NAMES[calls.hidden[0].dtype])
        try:
            embeddings = self.position_embeddings(positions)
            for layer, (hidden, expected) in enumerate(zip(calls.hidden, probe.calls, strict=True)):
                found: list[AttentionCall] = []
                self._project(layer, hidden, embeddings, found.append)
                _compare(found[0], expected, name, 0.0 if runner.is_exact else _TOLERANCE[expected.key.dtype])
        except HiddenStatesUnsupported:
            raise
        except Exception as error:  # An error of the model's own code, called in a way that it may not support.
            raise HiddenStatesUnsupported(
                f"attention modules of {name} cannot be called by themselves: {type(error).__name__}: {error}"
            ) from error
        return self.shape


class _Calls:
    """Records the arguments with which each attention module was called."""

    def __init__(self) -> None:
        self.hidden: list[torch.Tensor] = []
        self.kwargs: list[dict[str, Any]] = []

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.hidden.append(input_of(args, kwargs)[0].clone())
        self.kwargs.append({key: value for key, value in kwargs.items() if key != "hidden_states"})


def _settings(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the keywords to call a module with again.

    Raises HiddenStatesUnsupported for one that differs from step to step.
    """
    kept: dict[str, Any] = {}
    for key, value in kwargs.items():
        if key == "position_embeddings":
            kept[key] = None  # Computed again for each restoration.
        elif value is None or isinstance(value, bool | int | float | str):
            kept[key] = value
        elif key not in HARMLESS_EXTRAS:
            raise HiddenStatesUnsupported(f"attention of {name} takes {key}, so KV depends on more than hidden states")
    return kept


def _without_queries(module: torch.nn.Module, width: int | None) -> torch.nn.Module:
    """Return a second view of ``module`` that shares all weights but computes no queries and calls no hooks.

    Zeros of ``width`` take the place of queries, by default of their own width.
    """
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    twin._forward_pre_hooks = OrderedDict()
    twin._forward_pre_hooks_with_kwargs = OrderedDict()
    queries = module._modules.get("q_proj")
    if queries is not None:  # Otherwise the projection is fused, and queries cost only their share of it.
        twin._modules["q_proj"] = _NoQueries(width or int(queries.out_features))  # type: ignore[arg-type]
    return twin


def _compare(found: AttentionCall, expected: AttentionCall, name: str, tolerance: float) -> None:
    for kind, mine, theirs in (("K", found.key, expected.key), ("V", found.value, expected.value)):
        largest = theirs.abs().max().float().clamp_min(1e-12)
        deviation = ((mine.float() - theirs.float()).abs().max() / largest).item()
        if not deviation <= tolerance:
            raise HiddenStatesUnsupported(
                f"{kind} of layer {expected.layer} of {name} does not follow from its hidden states: deviation "
                f"{deviation:.2g}"
            )
