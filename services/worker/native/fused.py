"""The kernels of the fused forward (``fused.c``), called from Python."""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass

import torch

from services.worker.native.build import NotCompiled, load

LANES = 16
"""Outputs of one strip of weights."""

TERMS = ("qkv", "out", "gate_up", "down")
"""Linear layers of a layer, in the order of an adapter's terms for it."""

_FLAGS = (
    *("-fopenmp", "-fno-strict-aliasing"),
    # Products of the rotation are rounded before they are added, as torch does it; sums of weights ask for fused steps.
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *(["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []),
)
DTYPES = (torch.float32, torch.bfloat16)
SCALE_FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Values of ``scale_form_t`` in ``codes.h``."""


class KernelsUnavailable(Exception):
    """The fused kernels cannot be compiled, loaded or used here; the message says why."""


class MatrixStruct(ctypes.Structure):
    """``matrix_t``. In matrices of elements, the fields behind ``bits`` stay zero."""

    _fields_ = (
        *(("weights", ctypes.c_void_p), ("depth", ctypes.c_int64)),
        *((name, ctypes.c_int32) for name in ("strips", "bits", "group", "scale_form")),
        *((name, ctypes.c_void_p) for name in ("scales", "offsets")),
    )


class LowRankStruct(ctypes.Structure):
    """``low_rank_t``: the two matrices of one adapter's term, and their ranks."""

    _fields_ = (("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("ranks", ctypes.c_int64))


class LayerStruct(ctypes.Structure):
    """``layer_t``: the weights of one layer; None is NULL."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "q_norm", "k_norm", "post_norm")),
        *((name, ctypes.c_void_p) for name in ("qkv_bias", "out_bias", "gate_up_bias", "down_bias")),
    )


class ShapeStruct(ctypes.Structure):
    """``shape_t``: the sizes of a model."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("hidden", "query_heads", "kv_heads", "head_dim", "intermediate")),
        ("eps", ctypes.c_float),
    )


class StepStruct(ctypes.Structure):
    """``step_t``: the tables and buffers of one step."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rows", "threads")),
        *((name, ctypes.c_void_p) for name in ("x", "normed", "cosines", "sines", "positions", "slots", "scratch")),
        *((name, ctypes.c_void_p) for name in ("layers", "adapters", "adapted")),
        ("most_ranks", ctypes.c_int64),
    )


class DecodeStruct(ctypes.Structure):
    """``decode_t``: the attention of a whole decode step."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attend", "tables", "segments", "items", "partials")),
        *((name, ctypes.c_int32) for name in ("segment_count", "item_count")),
        ("scaling", ctypes.c_float),
    )


MIRRORS = {
    "matrix_t": MatrixStruct,
    "low_rank_t": LowRankStruct,
    "layer_t": LayerStruct,
    "shape_t": ShapeStruct,
    "step_t": StepStruct,
    "decode_t": DecodeStruct,
}


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights [outputs, inputs] as strips, which lie in ``memory``."""

    struct: MatrixStruct
    inputs: int
    memory: torch.Tensor

    @property
    def outputs(self) -> int:
        """Outputs of whole strips: a vocabulary may be a little smaller."""
        return int(self.struct.strips) * LANES

    def part(self, first: int, outputs: int) -> Matrix:
        """Return outputs ``[first, first + outputs)``, both multiples of LANES, in the same memory."""
        whole = self.struct
        part = MatrixStruct.from_buffer_copy(whole)
        row = self.inputs * whole.bits // 8 if whole.bits else int(whole.depth) * 4
        part.weights, part.strips = int(whole.weights) + first * row, outputs // LANES
        if whole.bits:
            before = first * (self.inputs // whole.group)
            part.scales = int(whole.scales) + before * (2 if whole.scale_form else 4)
            part.offsets = None if whole.offsets is None else int(whole.offsets) + before
        return Matrix(part, self.inputs, self.memory)


class FusedKernels:
    """The C library for one type of weights.

    Pointers are numbers, as ``Tensor.data_ptr`` gives them. Not thread-safe: its calls share scratch memory.
    """

    def __init__(self, dtype: torch.dtype, *, has_codes: bool = False, is_rounded: bool = False) -> None:
        """Compile or load the library.

        Kernels that ``has_codes`` take matrices of codes, too; pools that are ``is_rounded`` get K and V rounded.
        Raises KernelsUnavailable.
        """
        if dtype not in DTYPES:
            raise KernelsUnavailable(f"there are no fused kernels for {dtype}")
        self.dtype = dtype
        constants = {"LANES": LANES, "BFLOAT16": int(dtype == torch.bfloat16), "CODES": int(has_codes)}
        constants["ROUNDED"] = int(is_rounded)
        try:
            library = load("fused", _FLAGS, constants, MIRRORS)
        except NotCompiled as error:
            raise KernelsUnavailable(f"fused kernels cannot be compiled: {error}") from error
        pointer, int32, int64, real = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
        library.scratch_bytes.restype = int64
        library.scratch_bytes.argtypes = [int64, int64]
        library.first_outside.restype = int64
        library.first_outside.argtypes = [pointer, int64, int64]
        for name, arguments in {
            "between": [pointer] * 8,
            "decode_step": [pointer, pointer, int32, *[pointer] * 5],
            "logits": [pointer, pointer, pointer, pointer, pointer, int32, pointer, pointer, int64],
            "apply_linear": [pointer, pointer, pointer, int32, int64, pointer, int32, pointer],
            "apply_norm": [pointer, int64, int32, pointer, real, pointer, int32],
            "embed": [pointer, pointer, int32, pointer, int32],
        }.items():
            function = getattr(library, name)
            function.restype, function.argtypes = None, arguments
        self._library = library
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self.between, self.decode_step, self.logits = library.between, library.decode_step, library.logits

    @property
    def are_tuned(self) -> bool:
        """Whether the kernels were measured to be faster than oneDNN on processors with this one's instructions."""
        return bool(self._library.is_tuned())

    def scratch(self, inputs: int, intermediate: int = 0) -> int:
        """Return a pointer to scratch memory for all threads; valid until the next call with larger numbers."""
        needed = int(self._library.scratch_bytes(inputs, intermediate)) * torch.get_num_threads()
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        return self._scratch.data_ptr()

    def first_outside(self, numbers: torch.Tensor, limit: int) -> int:
        """Return the first place where ``numbers``, int64 [n] and contiguous, leave ``[0, limit)``; -1 if nowhere."""
        return int(self._library.first_outside(numbers.data_ptr(), len(numbers), limit))

    def linear(self, matrix: Matrix, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        """Return x [rows, inputs] times the matrix, plus the bias, [rows, outputs]."""
        x = x.contiguous()
        result = x.new_empty(len(x), matrix.outputs)
        self._library.apply_linear(
            ctypes.addressof(matrix.struct),
            None if bias is None else bias.data_ptr(),
            x.data_ptr(),
            len(x),
            matrix.inputs,
            result.data_ptr(),
            torch.get_num_threads(),
            self.scratch(matrix.inputs),
        )
        return result

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return the RMSNorm of x over its last dimension."""
        x = x.contiguous()
        result = torch.empty_like(x)
        width = x.shape[-1]
        self._library.apply_norm(
            x.data_ptr(), x.numel() // width, width, weight.data_ptr(), eps, result.data_ptr(), torch.get_num_threads()
        )
        return result

    def embed(self, matrix: Matrix, ids: torch.Tensor, result: torch.Tensor) -> None:
        """Write the weights of outputs ``ids`` (int64 [n], contiguous, in range) into ``result`` [n, inputs]."""
        self._library.embed(
            ctypes.addressof(matrix.struct), ids.data_ptr(), len(ids), result.data_ptr(), torch.get_num_threads()
        )
