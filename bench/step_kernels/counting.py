"""Counts what a computation would launch on a GPU: operators over fake CUDA tensors, and Triton kernels.

Tensors on ``cuda`` are fake here (``FakeTensorMode``): they have shapes, types and a device, and no memory. Everything
on the host is real. So whatever reads a number off the device cannot get it, and is found out, as is whatever a step
brings to the device while it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from bench.step_kernels.device_guard import cuda_guard

_LAUNCHES_NOTHING = frozenset({
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    "aten::detach", "aten::detach_", "aten::alias", "aten::lift_fresh", "aten::_unsafe_view", "aten::_reshape_alias",
    "aten::sym_size", "aten::sym_stride", "aten::sym_numel", "aten::unsafe_split", "aten::set_", "aten::resize_",
    "aten::pin_memory", "aten::_pin_memory", "aten::is_pinned",
})  # fmt: skip
"""Operators that are no views and yet only make or name memory."""


CAPABILITY = (9, 0)
"""Of the GPU that is played: H100 and H200."""


class HostRead(Exception):
    """The host asked for a number that is on the device, which stalls a step and cannot be captured."""


@dataclass(slots=True)
class Counted:
    """What was launched, by name. ``uploads`` are copies from the host, which are launches but no kernels."""

    kernels: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Kernels, Triton's among them."""
        return self.kernels.total()


class DeviceCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it CUDA tensors are fake, and :attr:`counted` has what was launched on them since it was replaced last.

    An operator counts as one kernel, and some launch more: sorting, scans, and products that are split.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode()
        self.counted = Counted()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See the class. Raises HostRead."""
        args, kwargs = tree_map_only(torch.device, _numbered, (args, kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        given = [each for each in leaves if isinstance(each, torch.Tensor)]
        to_device = any(isinstance(each, torch.device) and each.type == "cuda" for each in leaves)
        if not to_device and not any(isinstance(each, FakeTensor) for each in given):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if _is_composite(func):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        args, kwargs = tree_map_only(torch.Tensor, self._faked, (args, kwargs))
        name = func.name().partition(".")[0]
        try:
            made = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise HostRead(name) from error
        self._count(func, name, given, args, made)
        return made

    def launched(self, name: str) -> None:
        """Count a kernel that no operator stands for."""
        self.counted.kernels[name] += 1

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor)

    def _count(self, func: Any, name: str, given: list[torch.Tensor], args: tuple[Any, ...], made: Any) -> None:
        results = [each for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
        if (
            func.namespace == "prim"
            or func.is_view
            or name in _LAUNCHES_NOTHING
            or not any(each.numel() for each in results)
        ):
            return
        sources = {each.device.type for each in given if each.dim() or each.device.type == "cuda"}
        target = results[0].device.type
        if name in ("aten::_to_copy", "aten::copy_"):
            source = (args[1] if name == "aten::copy_" else args[0]).device.type
            if source != target:
                if target == "cpu":
                    raise HostRead(name)
                self.counted.uploads[name] += 1
                return
        if target == "cuda" or "cuda" in sources:
            self.counted.kernels[name] += 1


def _numbered(device: torch.device) -> torch.device:
    """A build for CPUs knows no current GPU to take for one without a number."""
    return torch.device("cuda", 0) if device.type == "cuda" else device


def _is_composite(func: Any) -> bool:
    """Whether an operator is made of others, which are what launches."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return func.namespace == "aten" and bool(has(func.name(), "CompositeImplicitAutograd"))


@contextmanager
def counting() -> Iterator[DeviceCounter]:
    """Count in this block. Triton kernels are not run in it; a launch with memory that no GPU can read is an error."""
    from triton.runtime.jit import JITFunction

    counter = DeviceCounter()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        if any(each.device.type != "cuda" for each in given):
            raise AssertionError(f"{kernel.__name__} is given memory of the host")
        kernel.signature.bind(*args, **{name: each for name, each in kwargs.items() if name in kernel.arg_names})
        counter.launched(kernel.__name__)

    capability = patch.object(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY)
    # torch asks the fake mode, and not ours, whether it may do without a GPU; ours is asked first for each operator.
    with patch.object(JITFunction, "run", run), capability, cuda_guard(), counter.fake, counter, torch.inference_mode():
        yield counter


def on_device(model: torch.nn.Module) -> None:
    """Put fake CUDA tensors in the place of all parameters and buffers, each once; within :func:`counting`."""
    known: dict[int, torch.Tensor] = {}

    def faked(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
        return known[id(tensor)]

    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(faked(parameter), requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = faked(buffer)
