"""The CUDA runtime's memory calls and last errors, without a GPU."""

from __future__ import annotations

import threading

SUCCESS, OUT_OF_MEMORY = 0, 2
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713


class FakeRuntime:
    """Satisfies ``shared.memory.cuda_runtime.CudaRuntime``. ``limit_bytes`` is what may be locked in all.

    Each thread has a last error, which a kernel launch raises as its own, as ``C10_CUDA_KERNEL_LAUNCH_CHECK`` does.
    """

    def __init__(self, limit_bytes: int = 2**40) -> None:
        self.limit_bytes = limit_bytes
        self.registered: dict[int, int] = {}  # First address to bytes.
        self.flags: list[int] = []
        self.calls = 0
        self._thread = threading.local()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name.
        self.calls += 1
        self.flags.append(flags)
        if any(first < address + nbytes and address < first + size for first, size in self.registered.items()):
            return self._fail(ALREADY_REGISTERED)
        if sum(self.registered.values()) + nbytes > self.limit_bytes:
            return self._fail(OUT_OF_MEMORY)
        self.registered[address] = nbytes
        return SUCCESS

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name.
        return SUCCESS if self.registered.pop(address, None) is not None else self._fail(NOT_REGISTERED)

    def cudaGetLastError(self) -> int:  # noqa: N802 - CUDA's name.
        last: int = getattr(self._thread, "last", SUCCESS)
        self._thread.last = SUCCESS
        return last

    def launch(self) -> None:
        """A kernel of this thread."""
        code = self.cudaGetLastError()
        if code:
            raise RuntimeError(f"CUDA error {code}")

    def _fail(self, code: int) -> int:
        self._thread.last = code
        return code
