"""Verdicts on the facts of this machine, with advice. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thermocline.doctor.facts import Facts

Verdict = Literal["ok", "note", "bad"]

_MIB, _GIB = 1024**2, 1024**3

# Needs of `thermocline up` with the bundled model, one worker and default settings.
_MIN_SHM = 64 * _MIB
_COMFORTABLE_SHM = 2 * _GIB
_COMFORTABLE_RUNS = 512 * _MIB
_MIN_MEMORY = 2 * _GIB
_MIN_FILES = 1024
_COMFORTABLE_FILES = 8192


@dataclass(frozen=True, slots=True)
class Check:
    """One verdict. ``bad`` keeps Thermocline from working here; ``note`` does not. ``advice`` is "" if all is well."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def judge(facts: Facts) -> tuple[Check, ...]:
    """Return all checks, in the order of the table."""
    return (
        _system(facts),
        _python(facts),
        _torch(facts),
        _libraries(facts),
        _gpu(facts),
        _device(facts),
        _compiler(facts),
        _nats_server(facts),
        _runs_folder(facts),
        _shared_memory(facts),
        _memory(facts),
        _cores(facts),
        _files(facts),
        _model(facts),
    )


def _system(facts: Facts) -> Check:
    if facts.system.startswith("Linux"):
        return Check("system", "ok", facts.system)
    return Check("system", "bad", facts.system, "Thermocline runs on Linux only: pools lie in /dev/shm")


def _python(facts: Facts) -> Check:
    found = ".".join(map(str, facts.python))
    if (3, 11) <= facts.python[:2] <= (3, 14):
        return Check("python", "ok", found)
    return Check("python", "bad", found, "install Python 3.11 to 3.14")


def _torch(facts: Facts) -> Check:
    if facts.torch_error:
        return Check("torch", "bad", facts.torch_error, "workers cannot start; run ./task again or pip install torch")
    return Check("torch", "ok", facts.torch_version)


def _libraries(facts: Facts) -> Check:
    if facts.libraries_too_old:
        return Check("libraries", "bad", "; ".join(facts.libraries_too_old), "workers refuse to start with them")
    if facts.libraries_untried:
        return Check("libraries", "note", "; ".join(facts.libraries_untried), "the cell says that it is degraded")
    return Check("libraries", "ok", "PyTorch, Triton and Transformers that this release was tried with")


def _gpu(facts: Facts) -> Check:
    if not facts.gpus:
        return Check("gpu", "note", "none that PyTorch can use", "models run on the CPU, which suits small ones")
    names = ", ".join(f"{name} ({nbytes / _GIB:.0f} GiB)" for name, nbytes in facts.gpus)
    return Check("gpu", "ok", names)


def _device(facts: Facts) -> Check:
    """Check which device ``--device auto``, the default of ``thermocline up``, chooses."""
    if not facts.auto_device:
        return Check("device", "note", "unknown", "PyTorch chooses it, and cannot be imported")
    if facts.auto_device == "cuda":
        return Check("device", "ok", f"auto takes cuda: {facts.gpus[0][0]}" if facts.gpus else "auto takes cuda")
    return Check("device", "note" if facts.gpus else "ok", f"auto takes cpu: {facts.auto_reason or 'there is no GPU'}")


def _compiler(facts: Facts) -> Check:
    if facts.compiler_error:
        advice = "slower portable paths serve; on Debian and Ubuntu: apt install gcc libc6-dev (CC names another)"
        return Check("C compiler", "note", facts.compiler_error, advice)
    return Check("C compiler", "ok", facts.compiler)


def _nats_server(facts: Facts) -> Check:
    if facts.nats_server_error:
        advice = "name a program with --nats-server PATH, or a broker of your own with --nats URL"
        return Check("nats-server", "bad", facts.nats_server_error, advice)
    return Check("nats-server", "ok", facts.nats_server)


def _runs_folder(facts: Facts) -> Check:
    if facts.runs_folder_error:
        return Check("runs folder", "bad", facts.runs_folder_error, "`thermocline up` needs it; set TMPDIR to another")
    found = facts.runs_folder
    if facts.runs_folder_free is not None:
        found += f", {_size(facts.runs_folder_free)} free"
        if facts.runs_folder_free < _COMFORTABLE_RUNS:
            advice = "streams and logs of a cell without --data-dir are there; give one, or set TMPDIR"
            return Check("runs folder", "note", found, advice)
    return Check("runs folder", "ok", found)


def _shared_memory(facts: Facts) -> Check:
    if facts.shm_total is None or facts.shm_free is None:
        return Check("/dev/shm", "bad", "missing", "mount a tmpfs there")
    found = f"{_size(facts.shm_free)} free of {_size(facts.shm_total)}"
    if facts.shm_free < _MIN_SHM:
        return Check("/dev/shm", "bad", found, "enlarge it (docker run --shm-size=2g) or remove stale files")
    if facts.shm_free < _COMFORTABLE_SHM:
        return Check("/dev/shm", "note", found, "pools will be small; docker run --shm-size=2g gives them room")
    return Check("/dev/shm", "ok", found)


def _memory(facts: Facts) -> Check:
    available, total = facts.memory_available, facts.memory_total
    if available is None or total is None:
        return Check("memory", "note", "unknown")
    found = f"{_size(available)} available of {_size(total)}"
    if available < _MIN_MEMORY:
        advice = f"a cell with the bundled model needs {_size(_MIN_MEMORY)}; the limit of a container or unit counts"
        return Check("memory", "bad", found, advice)
    return Check("memory", "ok", found)


def _cores(facts: Facts) -> Check:
    found = str(facts.cores)
    usable = float(facts.cores)
    if facts.cores_limit is not None and facts.cores_limit < facts.cores:
        found += f", limited to {facts.cores_limit:.1f}"
        usable = facts.cores_limit
    if usable < 2:
        return Check("cores", "note", found, "five processes share them; expect slow answers")
    return Check("cores", "ok", found)


def _files(facts: Facts) -> Check:
    # `thermocline up` raises the soft limit by itself, so the hard one counts.
    found = f"{facts.open_files}, may be raised to {facts.open_files_hard}"
    if facts.open_files >= facts.open_files_hard:
        found = str(facts.open_files)
    if facts.open_files_hard < _MIN_FILES:
        return Check("open files", "bad", found, f"raise the hard limit to {_COMFORTABLE_FILES}")
    if facts.open_files_hard < _COMFORTABLE_FILES:
        advice = f"each client takes one; for more than a few hundred raise the hard limit to {_COMFORTABLE_FILES}"
        return Check("open files", "note", found, advice)
    return Check("open files", "ok", found)


def _model(facts: Facts) -> Check:
    if facts.bundled_model:
        return Check("bundled model", "ok", facts.bundled_model)
    return Check("bundled model", "note", "not here", "name a model with --model DIR")


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:.0f} MiB"
