"""Resolve the project's dependencies from package metadata alone, as a stranger's machine would.

uv is started with an empty home and an empty environment: no configuration of pip or uv, no index but the public one.
Only the variables that name certificate authorities are handed on, because some networks cannot be left without them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.specifiers import SpecifierSet
from uv import find_uv_bin

CERTIFICATE_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
MACHINES = ("x86_64", "aarch64")
TIMEOUT_S = 300.0
_NO_SOLUTION = 1  # uv's exit code; 2 is everything else, such as an index that does not answer.
# manylinux: the wheels of llguidance need glibc 2.31, and those of torch 2.28.
_GLIBC = "manylinux_2_31"
_SECOND_DIGITS = range(100)


class Unresolvable(Exception):
    """No set of versions fits; the message is uv's explanation."""


class NoIndex(Exception):
    """The package index could not be asked; the message says why."""


def supported_pythons(requires_python: str) -> tuple[str, ...]:
    """The minor versions of Python 3 that ``requires-python`` allows, such as ``("3.11", "3.12")``.

    Raises ValueError where the range has no upper bound: nobody has tried what is not released.
    """
    allowed = SpecifierSet(requires_python)
    minors = tuple(f"3.{minor}" for minor in _SECOND_DIGITS if allowed.contains(f"3.{minor}.99"))
    if not minors or minors[-1] == f"3.{_SECOND_DIGITS[-1]}":
        raise ValueError(f"requires-python {requires_python!r} must have a lower and an upper bound")
    return minors


def clean_environment(home: Path) -> dict[str, str]:
    """HOME, PATH and LANG, and where certificates are; nothing that configures pip or uv."""
    kept = {name: os.environ[name] for name in CERTIFICATE_VARIABLES if name in os.environ}
    return {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", **kept}


def compile_requirements(home: Path, requirements: str, *flags: str) -> str:
    """What ``uv pip compile`` prints for these requirement lines. ``home`` keeps the metadata for the next call.

    Raises Unresolvable and NoIndex.
    """
    command = [find_uv_bin(), "pip", "compile", "--no-config", "--no-python-downloads", "--quiet", "--no-header"]
    done = subprocess.run(
        [*command, "--python", sys.executable, "--cache-dir", str(home / "cache"), *flags, "-"],
        input=requirements,
        env=clean_environment(home),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode == _NO_SOLUTION:
        raise Unresolvable(done.stderr.strip())
    if done.returncode != 0:
        raise NoIndex(done.stderr.strip())
    return done.stdout


def resolve(home: Path, requirements: list[str], python: str, machine: str) -> Iterator[str]:
    """The lines ``name==version`` that pip would install on Linux from wheels. Raises Unresolvable and NoIndex."""
    platform = ("--python-version", python, "--python-platform", f"{machine}-{_GLIBC}", "--only-binary", ":all:")
    text = compile_requirements(home, "\n".join(requirements), "--no-annotate", *platform)
    return (line for line in text.splitlines() if line)
