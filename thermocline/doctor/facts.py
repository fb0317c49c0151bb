"""Looks at this machine. Nothing is judged here, and whatever cannot be read is None or empty."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError
from thermocline.supervisor.config import bundled_model
from thermocline.supervisor.nats_server import find_nats_server

# PyTorch is asked in a process of its own: only the worker imports it, and a broken one must not break us.
_ASK_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
print(json.dumps({"version": torch.__version__, "gpus": [[gpu.name, gpu.total_memory] for gpu in gpus]}))
"""
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Facts:
    """Sizes in bytes. ``gpus`` are (name, bytes). Errors are texts; "" is none."""

    system: str
    python: tuple[int, int, int]
    torch_version: str
    torch_error: str
    gpus: tuple[tuple[str, int], ...]
    nats_server: str
    nats_server_error: str
    shm_total: int | None
    shm_free: int | None
    memory_total: int | None
    memory_available: int | None
    memory_limit: int | None
    cores: int
    cores_limit: float | None
    open_files: int
    open_files_hard: int
    bundled_model: str


def gather() -> Facts:
    """Look at everything; takes some seconds because PyTorch is started once."""
    torch_version, gpus, torch_error = _torch()
    nats_server, nats_server_error = _nats_server()
    memory = _memory_table()
    try:
        shm = shutil.disk_usage("/dev/shm")
    except OSError:
        shm = None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Facts(
        system=f"{platform.system()} {platform.machine()}",
        python=sys.version_info[:3],
        torch_version=torch_version,
        torch_error=torch_error,
        gpus=gpus,
        nats_server=nats_server,
        nats_server_error=nats_server_error,
        shm_total=shm.total if shm else None,
        shm_free=shm.free if shm else None,
        memory_total=memory.get("MemTotal"),
        memory_available=memory.get("MemAvailable"),
        memory_limit=parse_limit(_read(_CGROUP / "memory.max")),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cores_limit=parse_cpu_limit(_read(_CGROUP / "cpu.max")),
        open_files=_finite(soft),
        open_files_hard=_finite(hard),
        bundled_model=str(bundled_model() or ""),
    )


def parse_limit(text: str) -> int | None:
    """A cgroup limit: a number, or ``max`` for none."""
    return int(text) if text.strip().isdigit() else None


def parse_cpu_limit(text: str) -> float | None:
    """cgroup v2 ``cpu.max``, "quota period" in microseconds, as a number of cores."""
    fields = text.split()
    if len(fields) != 2 or not fields[0].isdigit() or not fields[1].isdigit():
        return None
    return int(fields[0]) / int(fields[1])


def parse_memory_table(text: str) -> dict[str, int]:
    """``/proc/meminfo`` in bytes."""
    table = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdigit():
            table[name] = int(fields[0]) * 1024
    return table


def _memory_table() -> dict[str, int]:
    return parse_memory_table(_read(Path("/proc/meminfo")))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _finite(limit: int) -> int:
    """RLIM_INFINITY is negative in Python; no limit is a very high one."""
    return 2**63 - 1 if limit == resource.RLIM_INFINITY else limit


def _torch() -> tuple[str, tuple[tuple[str, int], ...], str]:
    try:
        done = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "", (), "importing torch took more than 120 s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return "", (), lines[-1] if lines else f"exit code {done.returncode}"
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["version"], tuple((name, nbytes) for name, nbytes in answer["gpus"]), ""


def _nats_server() -> tuple[str, str]:
    try:
        program = find_nats_server()
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except ConfigError as error:
        return "", error.message
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    return f"{done.stdout.strip()} at {program}", ""
