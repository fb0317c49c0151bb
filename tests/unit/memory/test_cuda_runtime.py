"""Which errors of CUDA end a process, and which library of CUDA's is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.errors import DeviceFailed, TransportError
from shared.memory.cuda_runtime import is_out_of_memory, loaded_runtime, sticky_reason

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported asynchronously"


class Accelerated(RuntimeError):
    """As ``torch.AcceleratorError``."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.error_code = code


def caused_by(cause: Exception) -> TransportError:
    error = TransportError("cannot copy")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [RuntimeError(ILLEGAL), Accelerated("whatever it says", 719), caused_by(RuntimeError(ILLEGAL)), DeviceFailed("x")],
    ids=["words", "code", "cause", "typed"],
)
def test_errors_that_stay_are_known(error: Exception) -> None:
    """By torch's code, by CUDA's words, or by what caused them."""
    assert sticky_reason(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes do not match"),
        RuntimeError("CUDA error: invalid argument"),
        Accelerated("CUDA error: out of memory", 2),
        torch.OutOfMemoryError("CUDA out of memory"),
        ValueError("an illegal memory access was encountered"),
    ],
    ids=str,
)
def test_others_are_errors_of_one_call(error: Exception) -> None:
    """The process goes on with its GPU."""
    assert not sticky_reason(error)


def test_a_device_without_memory_is_told_from_other_errors() -> None:
    """By torch's type, its code or CUDA's words; an error that only mentions memory is none."""
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(Accelerated("", 2))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("out of memory"))


def test_a_process_without_the_runtime_says_so(tmp_path: Path) -> None:
    """Nothing is loaded for it: another copy would have last errors of its own."""
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 42    /usr/lib/libc.so.6\n7f02-7f03 rw-p 00000000 00:00 0\n")

    with pytest.raises(TransportError, match="runtime"):
        loaded_runtime(maps)
