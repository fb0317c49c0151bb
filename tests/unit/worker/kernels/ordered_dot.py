"""Products in Triton's interpreter as a GPU makes them: each element by itself, in one order, bfloat16 by its values.

numpy's product goes to a BLAS, which rounds a row by its place among the others; and the interpreter keeps bfloat16 as
the integers of its bits. Here every element is added over K from the first to the last. Which order an instruction of
a GPU has instead is not shown by any interpreter, only that our kernels give it the same operands.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def order_products() -> None:
    """Have ``tl.dot`` do so in this process; call it before any kernel runs."""
    import triton.language as tl
    from triton.runtime import interpreter

    def values(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data.astype(np.float32)
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(_: Any, a: Any, b: Any, added: Any, *others: Any) -> Any:
        left, right = values(a), values(b)
        total = added.data.astype(np.float32)
        for inner in range(left.shape[-1]):
            total = total + left[..., inner, None] * right[..., inner, :][..., None, :]
        return interpreter.TensorHandle(total, added.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
