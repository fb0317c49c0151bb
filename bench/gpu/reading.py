"""What the parts of the GPU benchmark have in common: they need a device, say so where there is none, and write JSON.

With ``--cpu`` a part runs in a tiny geometry on the processor, its kernels in Triton's interpreter. That proves that
the part works; its figures mean nothing, and say so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from bench import results_file
from bench.gpu.budget import Budget
from shared.messages.pools import KvGeometry

PREFIX = "thermocline-bench-gpu"

# Llama-3.1-8B in bfloat16: 128 KiB a token.
LLAMA_8B = KvGeometry(layers=32, kv_heads=8, head_dim=128, page_size=32, dtype="bfloat16")

# For --quick: the same rows in an eighth of the layers.
LLAMA_8B_SHALLOW = KvGeometry(layers=4, kv_heads=8, head_dim=128, page_size=32, dtype="bfloat16")

# For --cpu.
TINY = KvGeometry(layers=2, kv_heads=2, head_dim=16, page_size=16, dtype="float32")

NO_DEVICE = "no CUDA device: PyTorch sees no GPU on this machine, so nothing was measured"
NO_FIGURES = "on a processor, kernels interpreted, in a tiny geometry: proof that the part runs, not a figure"

Headline = Sequence[tuple[str, float | None, str]]
"""The few figures that a table shows: what, how much (None: not measured), and the unit."""

Item = TypeVar("Item")


class Reading:
    """One run of one part. Make it with :func:`begin`."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.is_quick: bool = options.quick
        self.is_tiny: bool = options.cpu
        self.device = torch.device("cpu" if options.cpu else "cuda")
        self.rounds: int = 1 if options.cpu else min(options.rounds, 3) if options.quick else options.rounds
        self.budget = Budget(options.seconds)
        self._out: Path | None = options.out

    def choose(self, full: Item, quick: Item, tiny: Item) -> Item:
        """What this run takes of three sizes."""
        return tiny if self.is_tiny else quick if self.is_quick else full

    def each(self, items: Iterable[Item], name: Callable[[Item], str] = str) -> Iterator[Item]:
        """Items as long as there is time; see :meth:`Budget.each`."""
        return self.budget.each(items, name)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def keep(self, results: dict[str, Any]) -> None:
        """Write what is known so far, where a file was named: whoever is killed later has not worked for nothing."""
        if self._out is not None:
            results_file.write(f"gpu_{self.name}", self._document(results, (), is_whole=False), seed=0, out=self._out)

    def finish(self, results: dict[str, Any], headline: Headline) -> None:
        """Print the results, and write them with what is needed to repeat them; by default a quick run is not kept, and
        one without a GPU never.
        """
        document = self._document(results, headline, is_whole=not self.budget.left_out)
        print(json.dumps(document, indent=2))
        if self._out is not None or not (self.is_quick or self.is_tiny):
            results_file.write(f"gpu_{self.name}", document, seed=0, out=self._out)

    def _document(self, results: dict[str, Any], headline: Headline, *, is_whole: bool) -> dict[str, Any]:
        return {
            **machine(self.device),
            "is_whole": is_whole,
            "left_out": self.budget.left_out,
            "headline": [list(line) for line in headline],
            **results,
        }


def machine(device: torch.device) -> dict[str, Any]:
    """The device and the versions that decide about its speed."""
    versions = {"torch": str(torch.__version__), "cuda": torch.version.cuda}
    if device.type != "cuda":
        return {"gpu": None, "note": NO_FIGURES, **versions}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        **versions,
    }


def begin(name: str, description: str | None, argv: Sequence[str] | None = None) -> Reading:
    """One run of the part ``name``, as its command line has it.

    Exits with code 0 and a clear line on a machine without a GPU, unless ``--cpu`` is given.
    """
    options = parser(description).parse_args(argv)
    if not options.cpu and not torch.cuda.is_available():
        print(NO_DEVICE)
        sys.exit(0)
    if options.cpu and argv is None:
        interpret_kernels()
    return Reading(name, options)


def parser(description: str | None) -> argparse.ArgumentParser:
    known = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    known.add_argument("--quick", action="store_true", help="small sizes and few rounds: does it run, is it right?")
    known.add_argument("--cpu", action="store_true", help="tiny, without a GPU, kernels interpreted: does it run?")
    known.add_argument("--rounds", type=int, default=9)
    known.add_argument("--seconds", type=float, help="begin nothing that would not end by then")
    known.add_argument("--out", type=Path, help="results file; by default bench/results/gpu_<name>.json")
    return known


def mend_interpreter() -> None:
    """Mend three faults of Triton's interpreter. Compiled kernels have nothing to do with them.

    That of 3.6 does not count with arrays of one element, which numpy since 2.5 takes for no number. That of 3.9
    refuses masks of numbers, and makes numbers of a comparison of scalars itself when it spreads it over a block.
    All multiply by BLAS, in which a row's rounding may depend on its place in the block; a GPU's does not.
    """
    # When Triton is first imported it is decided whether it interprets.
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched

    spread = interpreter.InterpreterBuilder.create_splat

    def spread_bits(self: Any, of: Any, value: Any) -> Any:
        made = spread(self, of, value)
        if value.data.dtype == np.bool_:
            made.data = made.data.astype(np.bool_)
        return made

    interpreter.InterpreterBuilder.create_splat = spread_bits

    multiply = interpreter.InterpreterBuilder.create_dot

    def multiply_rows_alike(self: Any, a: Any, b: Any, d: Any, *settings: Any) -> Any:
        kind = d.data.dtype
        if kind != np.float32 or 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
            return multiply(self, a, b, d, *settings)
        # Without BLAS, every element is summed in the order of the inner dimension.
        product = np.einsum("mk,kn->mn", a.data.astype(kind), b.data.astype(kind))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = multiply_rows_alike


def interpret_kernels() -> None:
    """Have Triton interpret kernels. Whether it does is decided when it is first imported, which was long ago: so this
    process begins anew, as the module that it runs.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        mend_interpreter()
        return
    module = sys.modules["__main__"].__spec__
    assert module is not None, "parts are run as modules"
    command = [sys.executable, "-m", module.name, *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, "TRITON_INTERPRET": "1"})
