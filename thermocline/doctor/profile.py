"""``thermocline doctor --profile``: measure this machine once, so that workers start with the fastest ways.

Movers, checksums and computation are measured by processes of the worker's own code (only workers import torch), the
disk here. Workers read the file at start, and refuse one of another machine or model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.worker.kv.profile import MoverFigure, Profile, default_path, read_profile, write_profile
from services.worker.restore.figures import RestorationProfile
from shared.disk_speed import DiskFigures, measure_disk, remember
from shared.errors import ConfigError
from shared.memory.machine_memory import free_shared_memory
from shared.messages.pools import KvGeometry
from thermocline.doctor import restoration
from thermocline.doctor.measuring import run_measurement
from thermocline.supervisor.cell import cpu_data_type, divide_cores, usable_cores
from thermocline.supervisor.model_demand import geometry_of

# Twelve layers, four KV heads of 64: small enough for any machine, and with the shortest rows in use.
DEFAULT_GEOMETRY = KvGeometry(layers=12, kv_heads=4, head_dim=64, page_size=16, dtype="float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to measure, and the file to write. Empty texts and 0 are the defaults of ``thermocline up``."""

    model: str = ""
    device: str = "cpu"
    dtype: str = ""
    threads: int = 0
    tokens: int = 4096
    page_sizes: str = "1,16,32,64"
    prefix_lengths: str = restoration.LENGTHS
    rounds: int = 5
    disk_dir: str = ""
    out: str = ""


def make_profile(wish: Wish, said: Callable[[str], None]) -> tuple[Profile, Path]:
    """Measure and write the profile; return it and its path. ``said`` gets lines of progress.

    Raises ConfigError when it cannot be measured or written.
    """
    if wish.disk_dir and not Path(wish.disk_dir).is_dir():  # Said before the minute that the rest takes.
        raise ConfigError(f"--disk-dir {wish.disk_dir}: there is no such folder")
    model = Path(wish.model).expanduser().resolve() if wish.model else None
    dtype = "auto"
    if model is not None:
        dtype = wish.dtype or (cpu_data_type(model) if wish.device == "cpu" else "auto")
    geometry = geometry_of(model, dtype) if model is not None else DEFAULT_GEOMETRY
    said("how fast pages move")
    flags = [
        *("--geometry", msgspec.json.encode(geometry).decode(), "--device", wish.device),
        *("--tokens", str(wish.tokens), "--page-sizes", wish.page_sizes, "--rounds", str(wish.rounds)),
    ]
    profile = msgspec.json.decode(run_measurement("services.worker.kv.measure", flags, said), type=Profile)
    if model is not None:
        said("what restoring costs")
        measured = restoration.measure_model(
            model,
            geometry,
            device=wish.device,
            dtype=dtype,
            threads=wish.threads or divide_cores(usable_cores(), 1),
            lengths=wish.prefix_lengths,
            rounds=wish.rounds,
            shm_bytes=free_shared_memory(),
            said=said,
        )
        profile = msgspec.structs.replace(profile, restorations=(measured,))
    if wish.disk_dir:
        said("how fast the disk is")
        profile = msgspec.structs.replace(profile, disk=_measured_disk(Path(wish.disk_dir)))
    path = Path(wish.out) if wish.out else default_path()
    try:
        write_profile(profile.with_restorations(_written_before(path, profile)), path)
    except OSError as error:
        raise ConfigError(f"cannot write the profile {path}: {error.strerror}") from error
    return profile, path


def _measured_disk(directory: Path) -> DiskFigures:
    """Measure the disk of a directory, and store the figures there for the storage that will use it."""
    figures = measure_disk(directory)
    try:
        remember(figures)
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}") from error
    return figures


def _written_before(path: Path, profile: Profile) -> Sequence[RestorationProfile]:
    """Return the models' figures in the file at ``path``, if it is of this machine; they are kept in the new file."""
    try:
        return read_profile(path, profile.machine).restorations
    except ConfigError:
        return ()


def report(profile: Profile, path: Path) -> str:
    """Return the profile as text, with tables of movers and restorations."""
    lines = [
        f"machine    {profile.machine.processor}, {profile.machine.cores} cores, {profile.machine.memory_gib} GiB"
        + "".join(f", {gpu}" for gpu in profile.machine.gpus),
        f"memcpy     {_speed(profile.memcpy_bytes_per_s)}",
        *([f"link       {_speed(profile.link_bytes_per_s)}"] if profile.link_bytes_per_s else []),
        f"checksum   {_speed(profile.checksum_bytes_per_s)}",
        f"matmul     {profile.matmul_flops_per_s / 1e12:.2f} TFLOP/s",
    ]
    if profile.disk is not None:
        disk = profile.disk
        lines.append(
            f"disk       write {_speed(disk.write_bytes_per_s)}, read {_speed(disk.read_bytes_per_s)}, "
            f"64 KiB reads {_speed(disk.small_read_bytes_per_s)}"
            + ("" if disk.is_direct else " (through the page cache)")
        )
    lines += ["", *_mover_table(profile.movers)]
    for each in profile.restorations:
        lines += ["", *restoration.table(each, profile.disk.read_bytes_per_s if profile.disk else 0.0)]
    lines += ["", f"Written to {path}; workers here use it from their next start."]
    return "\n".join(lines)


def _mover_table(figures: Sequence[MoverFigure]) -> list[str]:
    lines = [f"{'mover':<14}{'programs':>9}{'page size':>11}{'MiB':>8}{'copied':>13}{'verified':>13}"]
    for each in figures:
        programs = str(each.programs) if each.programs else "-"
        lines.append(
            f"{each.mover:<14}{programs:>9}{each.page_size:>11}{each.transfer_bytes / 2**20:>8.0f}"
            f"{_speed(each.bytes_per_s):>13}{_speed(each.verified_bytes_per_s):>13}"
        )
    return lines


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
