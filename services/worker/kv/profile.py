"""Measurements by ``thermocline doctor --profile`` of a machine, and a worker's use of them.

A profile holds for the machine that it was made on. A worker refuses another's, logs that, and takes the safe default.
Nothing here imports torch: the command line writes files that workers read.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from services.worker.restore.figures import RestorationProfile
from shared.disk_speed import DiskFigures
from shared.errors import ConfigError
from shared.messages.pools import KvGeometry
from shared.undecodable import UNDECODABLE

VERSION = 1

MOST_RESTORATIONS = 32
"""Models whose restoration one file keeps; those measured longest ago are dropped."""

MoverName = Literal["per_page", "batched", "gpu_assisted"]


class ProfileForeign(ConfigError):
    """A profile that is sound but was made on another machine, or for another model."""

    code = "profile_foreign"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a machine on which figures depend. Equal machines may use one another's profiles."""

    processor: str
    cores: int
    memory_gib: int
    gpus: tuple[str, ...] = ()


class MoverFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Bandwidth of one mover; bytes a second, medians. ``programs`` is 0 where a mover has none."""

    mover: MoverName
    device: Literal["cpu", "cuda"]
    dtype: str
    page_size: int
    transfer_bytes: int
    bytes_per_s: float
    verified_bytes_per_s: float
    programs: int = 0


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """All measurements. Speeds are medians."""

    version: int = VERSION
    made: str  # Date, ISO 8601.
    machine: Machine
    software: dict[str, str]  # Versions of the libraries used.
    geometry: KvGeometry  # Its page_size is that of the first figure.
    tokens: int
    memcpy_bytes_per_s: float
    checksum_bytes_per_s: float
    matmul_flops_per_s: float
    link_bytes_per_s: float = 0.0  # One large copy from pinned memory to the GPU; 0 without one.
    movers: tuple[MoverFigure, ...] = ()
    disk: DiskFigures | None = None
    restorations: tuple[RestorationProfile, ...] = ()  # One entry for each model, the latest measured last.

    def fastest(self, device: str, page_size: int, *, verified: bool) -> MoverFigure | None:
        """Return the best figure on this kind of device at the measured page size nearest to ``page_size``.

        None if there is none. Among equals the first measured wins.
        """
        of_device = [figure for figure in self.movers if figure.device == device]
        if not of_device:
            return None
        nearest = min({figure.page_size for figure in of_device}, key=lambda size: (abs(size - page_size), size))
        near = [figure for figure in of_device if figure.page_size == nearest]
        largest = max(figure.transfer_bytes for figure in near)
        return max(
            (figure for figure in near if figure.transfer_bytes == largest),
            key=lambda figure: figure.verified_bytes_per_s if verified else figure.bytes_per_s,
        )

    def restoration_of(self, here: RestorationProfile) -> RestorationProfile | None:
        """Return the figures for the model that ``here`` describes; None if no model was measured at all.

        Raises ProfileForeign, naming the differences to the nearest, where only others were.
        """
        nearest: tuple[str, ...] | None = None
        for each in reversed(self.restorations):
            differing = each.differences(here)
            if not differing:
                return each
            if nearest is None or len(differing) < len(nearest):
                nearest = differing
        if nearest is None:
            return None
        raise ProfileForeign(f"restoration was measured for another model: {'; '.join(nearest)}")

    def with_restorations(self, others: Iterable[RestorationProfile]) -> Profile:
        """Return this profile with the figures of ``others`` for models that it does not have."""
        mine = self.restorations
        kept = [each for each in others if all(each.differences(one) for one in mine)]
        return msgspec.structs.replace(self, restorations=(*kept, *mine)[-MOST_RESTORATIONS:])


def this_machine(gpus: tuple[str, ...] = ()) -> Machine:
    """Return the machine that this process runs on; ``gpus`` are the names that the driver gives them."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # All cores, not only those that this process may use: workers may be bound to a few.
    return Machine(processor=_processor(), cores=os.cpu_count() or 1, memory_gib=round(pages / 2**30), gpus=gpus)


def default_path() -> Path:
    """Return where a profile is written and looked for when no file is named."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "thermocline" / "profile.json"


def write_profile(profile: Profile, path: Path) -> None:
    """Write the profile atomically, so that a worker that starts now reads the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
    scratch.replace(path)


def read_profile(path: Path, machine: Machine) -> Profile:
    """Read the profile.

    Raises ConfigError, with the reason, for a file that cannot be read or is none; ProfileForeign for one of another
    machine.
    """
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"cannot read the profile {path}: {error.strerror}") from error
    except UNDECODABLE as error:
        raise ConfigError(f"{path} is no profile: {error}") from error
    if profile.version != VERSION:
        raise ConfigError(f"the profile {path} has version {profile.version}, not {VERSION}: measure again")
    differing = [
        f"{name} {getattr(profile.machine, name)!r} is {getattr(machine, name)!r} here"
        for name in Machine.__struct_fields__
        if getattr(profile.machine, name) != getattr(machine, name)
    ]
    if differing:
        raise ProfileForeign(f"the profile {path} was made on another machine: {'; '.join(differing)}")
    return profile


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()
