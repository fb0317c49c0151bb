"""One figure of the table, and the devices that it is for."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.kernels import page_gather
from thermocline.simulate.profiles import HardwareProfile, load_hardware

KIB = 1024


@dataclass(frozen=True, slots=True)
class Device:
    """A profile with what it lacks: ``shared_bytes`` are of shared memory that one program may have."""

    name: str
    multiprocessors: int
    shared_bytes: int
    profile: HardwareProfile

    @property
    def peak_bytes_per_s(self) -> float:
        """Of device memory, as its data sheet has it."""
        return self.profile.memory.bandwidth_gb_s * 1e9

    @property
    def read_bytes_per_s(self) -> float:
        """Of device memory, by large kernels."""
        return self.peak_bytes_per_s * self.profile.memory.weight_read_efficiency

    @property
    def peak_flop_per_s(self) -> float:
        """Dense products in bfloat16, as the data sheet has them."""
        return self.profile.compute.peak_tflops["bfloat16"] * 1e12

    @property
    def link_bytes_per_s(self) -> float:
        """Of one copy in one piece, which is the peak that loads are held against."""
        return self.profile.link.bandwidth_gb_s * 1e9 * self.profile.link.peak_efficiency

    @property
    def tiles_ahead(self) -> int:
        """Tiles that each program of the I/O kernel has on their way, of rows of one token."""
        return page_gather.stages(self.shared_bytes, 32) - 1


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, with the ``low`` and ``high`` ends of it over the assumptions that matter, None where one was made.

    ``aim`` is the target, "" where it is part of another's; ``measured`` is None until a GPU has.
    """

    key: str
    device: str
    what: str
    estimate: float
    unit: str
    aim: str = ""
    low: float | None = None
    high: float | None = None
    measured: float | None = None


def devices() -> list[Device]:
    """Those that are estimated; targets are the first one's."""
    return [
        Device("H200", 132, 227 * KIB, load_hardware("h200-pcie5")),
        Device("A100", 108, 163 * KIB, load_hardware("a100-pcie4")),
        Device("RTX 4090", 128, 99 * KIB, load_hardware("4090")),
    ]
