"""Registering memory with the driver: idempotent, and refusals become transport errors."""

from __future__ import annotations

import numpy as np
import pytest

from shared.errors import TransportError
from shared.memory.pinned import register, unregister

ARRAY = np.zeros(4096, dtype=np.uint8)


class Driver:
    """Answers as the CUDA runtime does, with a code."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[tuple[object, ...]] = []

    def cudaHostRegister(self, *arguments: int) -> int:  # noqa: N802
        self.calls.append(("register", *arguments))
        return self.code

    def cudaHostUnregister(self, *arguments: int) -> int:  # noqa: N802
        self.calls.append(("unregister", *arguments))
        return self.code


def test_the_whole_array_is_registered_portable_and_mapped() -> None:
    """Address, size and flags 1 | 2; the same address goes when it is unregistered."""
    driver = Driver(0)

    register(driver, ARRAY)
    unregister(driver, ARRAY)

    assert driver.calls == [("register", ARRAY.ctypes.data, 4096, 3), ("unregister", ARRAY.ctypes.data)]


def test_what_is_so_already_is_fine() -> None:
    """Registered twice (712), or unregistered without having been (713)."""
    register(Driver(712), ARRAY)
    unregister(Driver(713), ARRAY)


def test_a_refusal_says_what_to_look_at() -> None:
    """Out of lockable memory is the usual reason."""
    with pytest.raises(TransportError, match="ulimit -l"):
        register(Driver(2), ARRAY)
    with pytest.raises(TransportError, match="code 1"):
        unregister(Driver(1), ARRAY)
