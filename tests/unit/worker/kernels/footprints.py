"""What a compiled kernel takes of a GPU, read from Triton's intermediate code and from the machine code itself."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs

# Arrays in shared memory that copies fill while the last iteration computes: <buffers x rows x columns x type>.
_BUFFERS = re.compile(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x")
_WIDTHS = (
    (16, re.compile(r"ld\.global[.\w:]*\.(v4\.b32|v2\.b64)|cp\.async\.cg\.shared\.global")),
    (8, re.compile(r"ld\.global[.\w:]*\.(v2\.b32|b64)|cp\.async\.ca\.shared\.global \S+ \S+ 0x8")),
)


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """spills: instructions that write to or read from local memory. stack: bytes of it per thread. shared: bytes of
    shared memory per program. buffers: for each array that is loaded ahead, such as K and V, how many of its blocks
    shared memory holds, ascending. read_bytes: the widest global read, 16 at most, 4 for narrower ones too.
    """

    spills: int
    stack: int
    shared: int
    buffers: tuple[int, ...]
    read_bytes: int


def footprint(compiled: Any) -> Footprint:
    """Read it from a kernel that Triton compiled."""
    stack, spills = _local_memory(compiled.asm["cubin"])
    widths = [width for width, pattern in _WIDTHS if pattern.search(compiled.asm["ptx"])]
    return Footprint(
        spills=spills,
        stack=stack,
        shared=compiled.metadata.shared,
        buffers=tuple(sorted(int(count) for count in _BUFFERS.findall(compiled.asm["ttgir"]))),
        read_bytes=max(widths, default=4),
    )


def _local_memory(cubin: bytes) -> tuple[int, int]:
    """Bytes of stack, and instructions that use it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        usage = _output(knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        found = re.search(r"STACK:(\d+)", usage)
        assert found is not None, usage
        stack = int(found[1])
        # What is spilled has a place on the stack, so without one there is nothing to count.
        if stack == 0:
            return 0, 0
        code = _output(knobs.nvidia.nvdisasm.path, "-c", file.name)
        return stack, len(re.findall(r"\b(?:STL|LDL)\b", code))


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
