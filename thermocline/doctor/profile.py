"""``thermocline doctor --profile``: measure this machine once, so that workers start with what is fast here.

Movers, checksums and computation are measured by a process of the worker's own code (only workers import torch), the
disk here. Workers read the file at start; another machine's is refused.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from services.worker.kv.profile import MoverFigure, Profile, default_path, write_profile
from shared.errors import ConfigError
from shared.messages.pools import KvGeometry
from thermocline.doctor.disk_speed import measure_disk

MEASURE_SECONDS = 900

# Twelve layers, four KV heads of 64: small enough for any machine, and rows as short as they get.
DEFAULT_GEOMETRY = KvGeometry(layers=12, kv_heads=4, head_dim=64, page_size=16, dtype="float32")


def make_profile(
    *, model: str, device: str, tokens: int, page_sizes: str, rounds: int, disk_dir: str, out: str
) -> tuple[Profile, Path]:
    """Measure, write, and say where. Raises ConfigError when something cannot be measured or written."""
    geometry = geometry_of(Path(model)) if model else DEFAULT_GEOMETRY
    command = [
        *(sys.executable, "-m", "services.worker.kv.measure", "--geometry", msgspec.json.encode(geometry).decode()),
        *("--device", device, "--tokens", str(tokens), "--page-sizes", page_sizes, "--rounds", str(rounds)),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MEASURE_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"measuring took more than {MEASURE_SECONDS} s: try fewer --profile-tokens") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise ConfigError(f"measuring failed: {lines[-1] if lines else f'exit code {done.returncode}'}")
    profile = msgspec.json.decode(done.stdout.splitlines()[-1], type=Profile)
    if disk_dir:
        profile = msgspec.structs.replace(profile, disk=measure_disk(Path(disk_dir)))
    path = Path(out) if out else default_path()
    try:
        write_profile(profile, path)
    except OSError as error:
        raise ConfigError(f"cannot write the profile {path}: {error.strerror}") from error
    return profile, path


def geometry_of(model: Path) -> KvGeometry:
    """Shape of a checkpoint's KV, from its config.json. Raises ConfigError if that does not tell."""
    try:
        config = msgspec.json.decode((model / "config.json").read_bytes(), type=_ModelConfig)
    except OSError as error:
        raise ConfigError(f"cannot read {model / 'config.json'}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{model / 'config.json'} does not tell the shape of KV: {error}") from error
    heads = config.num_attention_heads
    return KvGeometry(
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads or heads,
        head_dim=config.head_dim or config.hidden_size // heads,
        page_size=16,
        dtype=config.dtype or config.torch_dtype or "float32",
    )


class _ModelConfig(msgspec.Struct):
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


def report(profile: Profile, path: Path) -> str:
    """A table for people."""
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
    lines += ["", *_mover_table(profile.movers), "", f"Written to {path}; workers here use it from their next start."]
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
