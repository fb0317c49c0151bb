"""Launches of kernels, captured where the host code makes them, and compiled as Triton would for a GPU.

Nothing about a kernel is repeated here: its signature, its compile-time arguments and its number of warps and stages
are those that the host function passes, and Triton's own binder says what it specialises on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature


@dataclass(frozen=True)
class Variant:
    """A kernel with all that Triton compiles it for on one target."""

    kernel: Any
    source: Any
    target: GPUTarget
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """The same for launches that share one compiled kernel."""
        return f"{self.kernel.__name__} {self.source.signature} {self.source.constants} {self.source.attrs}"

    def compile(self) -> Any:
        return compile(self.source, target=self.target, options=self.options)


@dataclass(frozen=True)
class Launch:
    """One call of ``kernel[grid](...)``."""

    kernel: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def variant(self, capability: int) -> Variant:
        """What this launch compiles for sm_``capability``."""
        target = GPUTarget("cuda", capability, 32)
        backend = make_backend(target)
        binder = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        kwargs = {"debug": False, **self.kwargs}
        bound, specialization, options = binder(*self.args, **kwargs)
        # The method's own name in Triton 3.6 and 3.7; there is no public one.
        packed = self.kernel._pack_args(backend, kwargs, bound, specialization, options)
        made, signature, constants, attributes = packed
        return Variant(self.kernel, ASTSource(self.kernel, signature, constants, attributes), target, made.__dict__)


def launches_of(call: Callable[[], object]) -> list[Launch]:
    """All launches that ``call`` makes, none of which runs."""
    with _captured() as seen:
        call()
    return seen


def note_variants(patch: pytest.MonkeyPatch, kernels: Iterable[Any], note: Callable[[str, str], object]) -> None:
    """Have launches of ``kernels`` do no more than note the kernel's name, and which variant Triton would launch."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    for kernel in kernels:
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)

        def run(*args: Any, grid: Any, warmup: bool, kernel: Any = kernel, binder: Any = binder, **kwargs: Any) -> None:
            bound, specialization, options = binder(*args, **kwargs)
            constants = {param.name: bound[param.name] for param in kernel.params if param.is_constexpr}
            note(kernel.__name__, f"{specialization} {constants} {options}")

        patch.setattr(kernel, "run", run)


@contextmanager
def _captured() -> Iterator[list[Launch]]:
    seen: list[Launch] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        seen.append(Launch(kernel, args, kwargs))

    run, JITFunction.run = JITFunction.run, note
    try:
        yield seen
    finally:
        JITFunction.run = run
