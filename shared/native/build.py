"""Compile a C file for this machine and load it: once per source, flags, compiler and processor.

No library is needed to serve: its caller keeps a portable path for machines without a C compiler. A library that is
missing is logged and listed in :data:`missing`, which heartbeats report.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shared.logs import get_logger

_SHARED = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared")
_COMPILE_SECONDS = 300  # Compilers differ, and so do loads: a minute was not enough for GCC 16 beside other work.
_MESSAGE_CHARS = 4000

missing: dict[str, str] = {}
"""Libraries that this process wanted and does not have, with the reasons."""

Mirror = type[ctypes.Structure]


class NotCompiled(Exception):
    """There is no such library on this machine; the message says why."""


def load(
    source: Path, flags: Sequence[str], constants: Mapping[str, int], mirrors: Mapping[str, Mirror]
) -> ctypes.CDLL:
    """Load the library of a C file, compiled now unless it is in this user's cache.

    It finds headers in its own folder and in this one. ``constants`` are macros that the file expects to be defined.
    ``mirrors`` are the structures that Python fills, by their names in C: one whose size, or a field's name, place or
    size, differs there does not compile.

    Raises NotCompiled, with the compiler's message, after announcing it.
    """
    try:
        library = _load(source, flags, constants, mirrors)
    except NotCompiled as error:
        announce_missing(source.stem, str(error))
        raise
    missing.pop(source.stem, None)
    return library


def announce_missing(name: str, reason: str) -> None:
    """Report to operators that the portable path is taken instead of a library. The same reason is logged once."""
    if missing.get(name) != reason:
        missing[name] = reason
        get_logger("native").warning("native_code_missing", library=name, reason=reason)


def _load(
    source: Path, flags: Sequence[str], constants: Mapping[str, int], mirrors: Mapping[str, Mirror]
) -> ctypes.CDLL:
    name, folders = source.stem, sorted({source.parent, _SHARED})
    unit = "\n".join([f'#include "{source.name}"', "#include <stddef.h>", *_assertions(mirrors), ""])
    compiler = os.environ.get("CC", "cc")
    flags = [*_FLAGS, *flags, *(f"-D{macro}={value}" for macro, value in constants.items())]
    sources = [source, *(path for folder in folders for path in sorted(folder.glob("*.h")))]
    identity = [unit, *(path.read_text(encoding="ascii") for path in sources), *flags]
    identity += [_run([compiler, "--version"]), _processor()]
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:24]
    command = [compiler, *flags, *(f"-I{folder}" for folder in folders), "-x", "c", "-"]
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thermocline"
        target = folder / f"{name}-{digest}.so"
        return ctypes.CDLL(str(target)) if target.exists() else _compile(command, unit, target)
    except (OSError, RuntimeError) as error:  # The latter where there is no home directory.
        raise NotCompiled(str(error)) from error


def _assertions(mirrors: Mapping[str, Mirror]) -> Iterator[str]:
    """Yield C that compiles only where each structure is laid out as its mirror."""
    for name, mirror in mirrors.items():
        yield f'_Static_assert(sizeof({name}) == {ctypes.sizeof(mirror)}, "size of {name} and {mirror.__name__}");'
        for field, *_ in mirror._fields_:
            place = getattr(mirror, field)
            where = f"offsetof({name}, {field}) == {place.offset}"
            size = f"sizeof((({name} *)0)->{field}) == {place.size}"
            yield f'_Static_assert({where} && {size}, "{field} of {name} and {mirror.__name__}");'


def _compile(command: Sequence[str], unit: str, target: Path) -> ctypes.CDLL:
    """Compile ``unit`` by ``command``, load the library, and keep it as ``target`` if its folder is writable."""
    is_kept = True
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = tempfile.TemporaryDirectory(dir=target.parent)
    except OSError as error:
        get_logger("native").warning(
            "native_code_not_kept", reason=str(error), consequence="it is compiled again at every start"
        )
        is_kept, folder = False, tempfile.TemporaryDirectory()
    with folder as scratch:
        built = Path(scratch) / target.name
        _run([*command, "-o", str(built)], unit)
        # Two processes may compile at once; either result is good. A library stays loaded without its file.
        return ctypes.CDLL(str(built.replace(target) if is_kept else built))


def _run(command: Sequence[str], source: str = "") -> str:
    """Return the output of ``command``, with ``source`` as its input. Raises NotCompiled where it fails."""
    try:
        done = subprocess.run(
            command, input=source, capture_output=True, encoding="utf-8", errors="replace", timeout=_COMPILE_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise NotCompiled(f"{command[0]} took more than {_COMPILE_SECONDS} s") from error
    except OSError as error:
        raise NotCompiled(f"there is no C compiler (CC can name one): {error}") from error
    if done.returncode != 0:
        raise NotCompiled(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[:_MESSAGE_CHARS]}")
    return done.stdout


def _processor() -> str:
    """Return the facts that ``-march=native`` depends on: a home directory may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))
