"""Facts about this machine, without judgement. What cannot be read is None or empty."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared import library_versions
from shared.errors import ConfigError
from shared.memory.machine_memory import memory_available_bytes
from thermocline.supervisor.config import bundled_model
from thermocline.supervisor.folders import folder_faults, free_bytes
from thermocline.supervisor.nats_program import find_nats_program
from thermocline.supervisor.records import runs_dir

# PyTorch runs in a process of its own: only the worker imports it, and a broken one must not break the doctor.
_ASK_TORCH = ("-m", "services.worker.torch_gpus")
_CGROUP = Path("/sys/fs/cgroup")
# Needs a header of the C library, and OpenMP, as Thermocline's C does: a machine may have a compiler without them.
_C_SOURCE = "#include <string.h>\n#include <omp.h>\nint threads(void) { return omp_get_max_threads(); }\n"


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about the machine, with sizes in bytes.

    ``gpus`` are (name, bytes). ``auto_device`` is what --device auto chooses, and ``auto_reason`` why that is no GPU.
    ``memory_available`` counts what limits of cgroups leave. Errors are texts; "" is none.
    """

    system: str
    python: tuple[int, int, int]
    torch_version: str
    torch_error: str
    libraries_too_old: tuple[str, ...]
    libraries_untried: tuple[str, ...]
    gpus: tuple[tuple[str, int], ...]
    auto_device: str
    auto_reason: str
    nats_server: str
    nats_server_error: str
    runs_folder: str
    runs_folder_error: str
    runs_folder_free: int | None
    shm_total: int | None
    shm_free: int | None
    memory_total: int | None
    memory_available: int | None
    compiler: str
    compiler_error: str
    cores: int
    cores_limit: float | None
    open_files: int
    open_files_hard: int
    bundled_model: str


def gather() -> Facts:
    """Gather all facts; takes some seconds because it imports PyTorch in a process of its own."""
    torch, torch_error = _torch()
    nats_server, nats_server_error = _nats_server()
    runs_folder, runs_folder_error = _runs_folder()
    compiler, compiler_error = _compiler()
    try:
        shm = shutil.disk_usage("/dev/shm")
    except OSError:
        shm = None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Facts(
        system=f"{platform.system()} {platform.machine()}",
        python=sys.version_info[:3],
        torch_version=torch.version,
        torch_error=torch_error,
        libraries_too_old=tuple(library_versions.too_old()),
        libraries_untried=tuple(library_versions.untried()),
        gpus=torch.gpus,
        auto_device=torch.auto,
        auto_reason=torch.reason,
        nats_server=nats_server,
        nats_server_error=nats_server_error,
        runs_folder=runs_folder,
        runs_folder_error=runs_folder_error,
        runs_folder_free=free_bytes(Path(runs_folder)) if runs_folder else None,
        shm_total=shm.total if shm else None,
        shm_free=shm.free if shm else None,
        compiler=compiler,
        compiler_error=compiler_error,
        memory_total=parse_memory_table(_read(Path("/proc/meminfo"))).get("MemTotal"),
        memory_available=_memory_available(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cores_limit=parse_cpu_limit(_read(_CGROUP / "cpu.max")),
        open_files=_finite(soft),
        open_files_hard=_finite(hard),
        bundled_model=str(bundled_model() or ""),
    )


def parse_cpu_limit(text: str) -> float | None:
    """Return a cgroup v2 ``cpu.max``, "quota period" in microseconds, as a number of cores; None without a limit."""
    fields = text.split()
    if len(fields) != 2 or not fields[0].isdigit() or not fields[1].isdigit():
        return None
    return int(fields[0]) / int(fields[1])


def parse_memory_table(text: str) -> dict[str, int]:
    """Return the entries of ``/proc/meminfo`` in bytes."""
    table = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdigit():
            table[name] = int(fields[0]) * 1024
    return table


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _finite(limit: int) -> int:
    """Return the limit, or 2^63 - 1 for RLIM_INFINITY, which is negative in Python."""
    return 2**63 - 1 if limit == resource.RLIM_INFINITY else limit


class _Torch(msgspec.Struct, frozen=True):
    """The output of ``services.worker.torch_gpus``."""

    version: str = ""
    gpus: tuple[tuple[str, int], ...] = ()
    auto: str = ""
    reason: str = ""


def _torch() -> tuple[_Torch, str]:
    try:
        done = subprocess.run([sys.executable, *_ASK_TORCH], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return _Torch(), "importing torch took more than 120 s"
    except OSError as error:
        return _Torch(), f"cannot start another Python: {error}"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return _Torch(), lines[-1] if lines else f"exit code {done.returncode}"
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=_Torch), ""


def _compiler() -> tuple[str, str]:
    """Return the C compiler that workers and storages use, or "" and why it does not compile their kind of code."""
    program = os.environ.get("CC", "cc")
    command = [program, "-fopenmp", "-shared", "-fPIC", "-x", "c", "-", "-o"]
    try:
        with tempfile.TemporaryDirectory() as folder:
            command.append(f"{folder}/compiled.so")
            done = subprocess.run(command, input=_C_SOURCE, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "", f"{program} took more than 120 s"
    except OSError as error:
        return "", f"there is none: {error}"
    if done.returncode != 0:
        return "", (done.stderr.strip().splitlines() or [f"{program} ended with {done.returncode}"])[0]
    return program, ""


def _memory_available() -> int | None:
    """Return the free bytes that pools may be made of, limits of cgroups counted."""
    try:
        return memory_available_bytes()
    except ConfigError:
        return None


def _nats_server() -> tuple[str, str]:
    """Return the program that ``thermocline up`` would start here, or "" and the error."""
    try:
        return str(find_nats_program(os.environ.get("THERMOCLINE_NATS_SERVER", ""))), ""
    except ConfigError as error:
        return "", error.message


def _runs_folder() -> tuple[str, str]:
    """Return the folder of cells' records, or "" and why there can be none."""
    try:
        folder = runs_dir()
        if faults := folder_faults("TMPDIR", folder):
            raise ConfigError.of(faults)
    except ConfigError as error:
        return "", error.message
    return str(folder), ""
