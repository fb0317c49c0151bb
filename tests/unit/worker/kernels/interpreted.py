"""Runs kernels in Triton's interpreter, in a process of its own.

Whether Triton interprets is decided when it is first imported, and other tests import it to compile. So the
interpreter gets a process with TRITON_INTERPRET=1, to which arguments travel as numpy arrays.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from bench.gpu.reading import mend_interpreter


class Interpreter:
    """Calls kernels of ``services.worker.kernels`` by name, or whatever else is to see them interpreted."""

    def __init__(self, executor: ProcessPoolExecutor) -> None:
        self._executor = executor

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Any function of a module, called there."""
        return self._executor.submit(function, *arguments).result(150)

    def paged_attention(
        self,
        tensors: dict[str, torch.Tensor],
        paged: dict[str, Any],
        settings: dict[str, Any],
        kernels: str = "services.worker.kernels",
    ) -> torch.Tensor:
        """The answer of a package of kernels for the same arguments as the oracle's."""
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        tables, settings = as_arrays(paged), as_arrays(settings)
        return torch.from_numpy(self._executor.submit(_paged_attention, kernels, arrays, tables, settings).result(150))

    def exact_attention(
        self, tensors: dict[str, torch.Tensor], paged: dict[str, Any], settings: dict[str, Any]
    ) -> torch.Tensor:
        """The answer of the kernels of exact mode."""
        return self.paged_attention(tensors, paged, settings, "services.worker.kernels.exact")

    def kv_write(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The pools after the write."""
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        k_pool, v_pool = self._executor.submit(_kv_write, arrays).result(150)
        return torch.from_numpy(k_pool), torch.from_numpy(v_pool)


def as_arrays(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in fields.items()}


def as_tensors(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in fields.items()}


@contextmanager
def running_interpreter() -> Iterator[Interpreter]:
    """Start the process; it ends with the context."""
    previous = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        executor = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        executor.submit(_is_interpreting).result(150)
    finally:
        if previous is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = previous
    try:
        yield Interpreter(executor)
    finally:
        executor.shutdown()


def _is_interpreting() -> None:
    torch.set_num_threads(1)
    assert os.environ["TRITON_INTERPRET"] == "1"
    mend_interpreter()
    _round_as_hardware_does()


def _round_as_hardware_does() -> None:
    """Have fp32 rounded to the nearest bfloat16, ties to even, where Triton's interpreter cuts."""
    from triton import language
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounding(numbers: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        if source == language.float32 and target == language.bfloat16:
            made = torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.bfloat16)
            return made.view(torch.int16).numpy().view(np.uint16).reshape(numbers.shape)
        converted: np.ndarray = convert(numbers, source, target, mode)
        return converted

    interpreter._convert_float = rounding


def _paged_attention(
    kernels: str, arrays: dict[str, np.ndarray], tables: dict[str, Any], settings: dict[str, Any]
) -> np.ndarray:
    from services.worker.engine.forward_meta import PagedTensors, SharedTensors

    attend: Callable[..., torch.Tensor] = importlib.import_module(kernels).paged_attention

    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    fields = as_tensors(tables)
    if "row_keys" in fields:
        fields["shared"] = SharedTensors(*(fields.pop(name) for name in ("row_keys", "tile_rows", "tile_keys")))
    q, k_pool, v_pool = tensors.values()
    return attend(q, k_pool, v_pool, PagedTensors(**fields), **as_tensors(settings)).numpy()


def _kv_write(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    from services.worker.kernels import kv_write

    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    kv_write(**tensors)
    return tensors["k_pool"].numpy(), tensors["v_pool"].numpy()
