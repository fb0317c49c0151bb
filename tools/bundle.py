"""Wheels for a machine without a network: ``./task bundle -- --python 3.12 --installed FILE --out build/bundle``.

``FILE`` is what ``pip list --format=freeze`` prints on that machine. What it has and what fits is left out, and so is
what only that needs: PyTorch with CUDA's libraries, for one. Without ``FILE`` everything is in the bundle. The folder
gets the wheels, ``requirements.txt`` with their digests, ``bundle.json`` and ``INSTALL.txt``.

A bundle for a machine that has PyTorch, Triton and Transformers is bounded, because what such a machine lacks is small:
one above the bound is not written, and its largest wheels are named. ``tools/gpu_machine.txt`` lists such a machine.

Versions are resolved from the public index's metadata (tools/resolution.py); pip fetches the wheels from the index that
it is configured for, and takes only those whose digests the public one has.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.lock import ROOT, read_project, requirements_of
from tools.release_check import build, committed_s, copy_source, sha256
from tools.resolution import MACHINES, NoIndex, Unresolvable, compile_requirements, supported_pythons
from tools.wheel_trial import ReleaseFault

GLIBC = 31
"""The second number of the oldest glibc 2 that the wheels need: that of llguidance 2.31, those of PyTorch 2.28."""

TEST_TOOLS = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout")
"""What the tests of ``tests/gpu`` need besides, which the GPU benchmark begins with."""

MOST_MB = 35.0
"""Bound of a bundle for a machine that has :data:`LARGE`, in 10^6 bytes: it may come there by a slow or narrow way."""

LARGE = frozenset({"torch", "transformers", "triton"})
"""What makes a bundle large, with what only that needs. Machines with GPUs often have it."""

_NAMED_MOST = 12

_OLDEST_GLIBC = 5
_ALIASES = {"manylinux1": 5, "manylinux2010": 12, "manylinux2014": 17}
"""Names that platforms had before they were called after glibc."""

_INSTALLED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;+]+)(?:\+\S+)?")
_ENTRY = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==(\S+)", re.MULTILINE)
_DOWNLOAD_S = 3600.0

INSTALL = """\
Thermocline {version} for Python {python} on Linux, {machine}, glibc 2.{glibc} or later.

Into the environment whose packages were left out:

    python{python} -m pip install --no-index --no-deps --find-links . --requirement requirements.txt

Into a folder of its own, with nothing of that environment changed:

    python{python} -m pip install --no-index --no-deps --target FOLDER *.whl
    export PYTHONPATH=FOLDER

Left out, because the machine has them: {left_out}
"""


class BundleFault(Exception):
    """No bundle can be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A machine that the bundle is for. ``installed``: canonical names and versions, without local labels."""

    python: str
    machine: str
    installed: Mapping[str, str]

    @property
    def resolver_flags(self) -> tuple[str, ...]:
        system = f"{self.machine}-manylinux_2_{GLIBC}"
        return ("--python-version", self.python, "--python-platform", system, "--only-binary", ":all:")

    @property
    def pip_flags(self) -> tuple[str, ...]:
        """pip compares names of platforms, so every one is named whose wheels run there."""
        names = [f"manylinux_2_{number}_{self.machine}" for number in range(GLIBC, _OLDEST_GLIBC - 1, -1)]
        names += [f"{alias}_{self.machine}" for alias, number in _ALIASES.items() if number <= GLIBC]
        platforms = [flag for name in names for flag in ("--platform", name)]
        return ("--python-version", self.python, "--implementation", "cp", *platforms)


@dataclass(frozen=True, slots=True)
class Choice:
    """What goes into a bundle: requirement lines with digests; ``left_out`` are names and versions of the target's."""

    carried: str
    left_out: Mapping[str, str]


def read_installed(text: str) -> dict[str, str]:
    """Canonical names and versions, of the lines ``name==version``; lines of other forms name no release.

    Raises BundleFault where no line is of that form.
    """
    lines = map(_INSTALLED.fullmatch, text.split("\n"))
    found: dict[str, str] = {canonicalize_name(line[1]): line[2] for line in lines if line}
    if not found:
        raise BundleFault("no line is name==version: is this what pip list --format=freeze printed?")
    return found


def requirements(project: Mapping[str, Any], *, has_tests: bool) -> list[str]:
    """Requirement lines of the bundle; with ``has_tests`` the development ones of ``TEST_TOOLS`` too."""
    asked = requirements_of(dict(project), dev=False)
    if not has_tests:
        return asked
    extra = requirements_of(dict(project), dev=True)[len(asked) :]
    return asked + [line for line in extra if canonicalize_name(Requirement(line).name) in TEST_TOOLS]


def choose(home: Path, requirements: Sequence[str], target: Target) -> Choice:
    """Resolve for the target, with its own versions where they fit. ``home`` keeps metadata for the next call.

    Raises Unresolvable and NoIndex.
    """
    # uv prefers versions that it finds in its output file.
    kept = home / "kept.txt"
    kept.write_text("".join(f"{name}=={version}\n" for name, version in target.installed.items()), encoding="utf-8")
    asked = "\n".join(requirements)
    flags = (*target.resolver_flags, "--no-annotate")
    compile_requirements(home, asked, *flags, "--output-file", str(kept))
    together = kept.read_text(encoding="utf-8")
    left_out = {name: version for name, version in _ENTRY.findall(together) if target.installed.get(name) == version}
    # A requirement that never applies takes the place of every other on that name, and with it goes what only it needs.
    (home / "left_out.txt").write_text(
        "".join(f"{name} ; python_version < '3'\n" for name in left_out), encoding="utf-8"
    )
    fixed = ("--constraints", str(kept), "--overrides", str(home / "left_out.txt"))
    return Choice(compile_requirements(home, asked, *flags, *fixed, "--generate-hashes"), left_out)


def fetch(carried: str, target: Target, folder: Path) -> None:
    """Have pip fetch exactly these wheels into ``folder``. Raises BundleFault with what it says."""
    listed = folder / "requirements.txt"
    listed.write_text(carried, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--only-binary=:all:", *target.pip_flags, "--dest", str(folder), "-r", str(listed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_S)
    if done.returncode != 0:
        raise BundleFault(f"pip could not fetch the wheels:\n{done.stderr.strip()}")


def own_wheel(folder: Path) -> None:
    """Build the project's wheel of what git knows into ``folder``. Raises ReleaseFault."""
    with tempfile.TemporaryDirectory() as name:
        source, out = Path(name) / "source", Path(name) / "out"
        copy_source(source)
        _, wheel = build(source, out, epoch_s=committed_s())
        shutil.copy2(wheel, folder)


def check_size(folder: Path, most_mb: float | None) -> None:
    """Raise BundleFault, which names the largest wheels, where those in ``folder`` come to more than ``most_mb``."""
    sizes = {each.name: each.stat().st_size for each in folder.glob("*.whl")}
    nbytes = sum(sizes.values())
    if most_mb is None or nbytes <= most_mb * 1e6:
        return
    largest = sorted(sizes.items(), key=lambda each: (-each[1], each[0]))[:_NAMED_MOST]
    named = "".join(f"\n  {size / 1e6:6.2f} MB  {name}" for name, size in largest)
    raise BundleFault(
        f"{len(sizes)} wheels are {nbytes / 1e6:.2f} MB, {nbytes / 1e6 - most_mb:.2f} more than {most_mb:g} "
        f"(--most-mb). The largest:{named}"
    )


def describe(folder: Path, choice: Choice, target: Target) -> int:
    """Write the list of what is needed, the manifest and how to install; returns the bytes of the wheels."""
    project_version = read_project()["version"]
    wheels = sorted(folder.glob("*.whl"))
    entries = [{"name": each.name, "bytes": each.stat().st_size, "sha256": sha256(each)} for each in wheels]
    own = (
        f"./{entry['name']} --hash=sha256:{entry['sha256']}\n"
        for entry in entries
        if str(entry["name"]).startswith("thermocline-")
    )
    (folder / "requirements.txt").write_text(choice.carried + "".join(own), encoding="utf-8")
    nbytes = sum(each.stat().st_size for each in wheels)
    manifest = {
        "version": project_version,
        "python": target.python,
        "machine": target.machine,
        "glibc": f"2.{GLIBC}",
        "bytes": nbytes,
        "left_out": dict(choice.left_out),
        "wheels": entries,
    }
    (folder / "bundle.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    facts = {"version": project_version, "python": target.python, "machine": target.machine, "glibc": GLIBC}
    (folder / "INSTALL.txt").write_text(INSTALL.format(left_out=_names(choice), **facts), encoding="utf-8")
    return nbytes


def _names(choice: Choice) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(choice.left_out.items())) or "nothing"


def bundle(
    out: Path, target: Target, *, has_project: bool, has_tests: bool = False, most_mb: float | None = None
) -> Iterator[str]:
    """Make the bundle in ``out``, which must be empty or missing; yields what there is to say. Wheels of more than
    ``most_mb`` are a fault: by default ``MOST_MB`` for a machine that has ``LARGE``, and no bound for others.

    Raises BundleFault, ReleaseFault, Unresolvable and NoIndex, and leaves nothing half made.
    """
    if out.exists() and any(out.iterdir()):
        raise BundleFault(f"{out} is not empty")
    with tempfile.TemporaryDirectory() as name:
        home, folder = Path(name) / "home", Path(name) / "bundle"
        home.mkdir()
        folder.mkdir()
        choice = choose(home, requirements(read_project(), has_tests=has_tests), target)
        fetch(choice.carried, target, folder)
        if has_project:
            own_wheel(folder)
        check_size(folder, MOST_MB if most_mb is None and choice.left_out.keys() >= LARGE else most_mb)
        nbytes = describe(folder, choice, target)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(folder, out, dirs_exist_ok=True)
    yield f"left out, because the machine has them: {_names(choice)}"
    yield f"{out}: {len(list(out.glob('*.whl')))} wheels, {nbytes / 1e6:.1f} MB, for Python {target.python}"


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 made, 1 not."""
    known = supported_pythons(read_project()["requires-python"])
    parser = argparse.ArgumentParser(prog="python -m tools.bundle", description=__doc__.split("\n", maxsplit=1)[0])
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", choices=known, default=own, help=f"of the machine; default {own}")
    parser.add_argument("--machine", choices=MACHINES, default=platform.machine(), help="default: as here")
    parser.add_argument("--installed", type=Path, metavar="FILE", help="pip list --format=freeze of the machine")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bundle", help="folder, empty or new")
    parser.add_argument("--without-project", action="store_true", help="no wheel of Thermocline: for a checkout")
    parser.add_argument("--with-tests", action="store_true", help="pytest too: for the GPU benchmark in a checkout")
    parser.add_argument(
        "--most-mb", type=float, metavar="MB", default=None,
        help=f"fail above this; default {MOST_MB:g} for a machine that has {', '.join(sorted(LARGE))}, else none",
    )  # fmt: skip
    options = parser.parse_args(argv)
    try:
        installed = read_installed(options.installed.read_text(encoding="utf-8")) if options.installed else {}
        target = Target(options.python, options.machine, installed)
        for said in bundle(
            options.out,
            target,
            has_project=not options.without_project,
            has_tests=options.with_tests,
            most_mb=options.most_mb,
        ):
            print(f"bundle: {said}")
    except (BundleFault, ReleaseFault, Unresolvable, NoIndex, OSError) as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
