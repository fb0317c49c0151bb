"""The lock files: exact versions, with hashes, of everything but PyTorch, Triton and what only they bring.

    python -m tools.lock               renew the files, keeping versions that still fit
    python -m tools.lock --upgrade     take the newest versions that fit
    python -m tools.lock --check       compare the files with pyproject.toml; needs no network

``requirements.lock`` is for running, ``requirements-dev.lock`` adds the extra ``dev``. Both hold for every supported
Python and machine. PyTorch's builds for CUDA and for CPUs differ in what they need, so the choice of one, and with it
Triton and CUDA's libraries, is left to the installation; everything else is resolved together with the CUDA build.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.resolution import MACHINES, NoIndex, Unresolvable, compile_requirements, supported_pythons

ROOT = Path(__file__).parents[1]
RUNTIME, DEV = "requirements.lock", "requirements-dev.lock"
UNLOCKED = ("torch", "triton")
_DIGEST = "# Requirements: "
_HEADER = """\
# Made by `./task lock` from pyproject.toml; do not edit. {what}
# Neither PyTorch nor Triton nor what only they need is here: see docs/how-to/install.md.
{digest}
"""
_WHAT = {RUNTIME: "What Thermocline runs on.", DEV: "What it runs on, and what its tests and tools need."}


@dataclass(frozen=True, slots=True)
class Pin:
    """One entry of a lock file."""

    requirement: Requirement
    hashes: tuple[str, ...]

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def version(self) -> str:
        return str(self.requirement.specifier).removeprefix("==")


def read_project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def requirements_of(project: dict[str, Any], *, dev: bool) -> list[str]:
    """What ``pyproject.toml`` asks for, with or without the extra ``dev``."""
    return [*project["dependencies"], *(project["optional-dependencies"]["dev"] if dev else ())]


def digest_line(project: dict[str, Any]) -> str:
    """A line that changes whenever anything changes that the lock files follow from."""
    asked = [project["requires-python"], sorted(requirements_of(project, dev=False))]
    asked.append(sorted(requirements_of(project, dev=True)))
    return _DIGEST + hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def environments(project: dict[str, Any]) -> Iterator[dict[str, str]]:
    """The values of markers on each Python, in its first release and in a late one, and machine that is supported."""
    for python, patch, machine in product(supported_pythons(project["requires-python"]), (0, 99), MACHINES):
        yield {
            "python_version": python,
            "python_full_version": f"{python}.{patch}",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": machine,
            "os_name": "posix",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "extra": "",
        }


def make(project: dict[str, Any], home: Path, *, upgrade: bool, root: Path = ROOT) -> dict[str, str]:
    """The text of each lock file. Raises Unresolvable and NoIndex."""
    (lowest, *_) = supported_pythons(project["requires-python"])
    universal = ("--universal", "--python-version", lowest)
    # uv keeps the versions that it finds in its output file.
    kept = home / "kept.txt"
    if not upgrade and (root / DEV).exists():
        kept.write_text((root / DEV).read_text(encoding="utf-8"), encoding="utf-8")
    keeping = (*universal, "--no-annotate", "--output-file", str(kept))
    compile_requirements(home, "\n".join(requirements_of(project, dev=True)), *keeping)
    # What others need of them is left out with them.
    nowhere = home / "nowhere.txt"
    nowhere.write_text("".join(f"{name}; python_version < '3'\n" for name in UNLOCKED), encoding="utf-8")
    found = {}
    for name in (RUNTIME, DEV):
        asked = [
            text
            for text in requirements_of(project, dev=name == DEV)
            if canonicalize_name(Requirement(text).name) not in UNLOCKED
        ]
        fixed = (
            *universal,
            "--generate-hashes",
            "--no-annotate",
            "--constraints",
            str(kept),
            "--overrides",
            str(nowhere),
        )
        text = compile_requirements(home, "\n".join(asked), *fixed)
        found[name] = _HEADER.format(what=_WHAT[name], digest=digest_line(project)) + _needed(text, project)
    return found


def _needed(text: str, project: dict[str, Any]) -> str:
    """The entries that some supported environment needs: a universal resolution has other systems' too."""
    everywhere = list(environments(project))
    return "".join(
        entry for entry in _entries(text) if any(_applies(_pin(entry).requirement.marker, each) for each in everywhere)
    )


def _entries(text: str) -> Iterator[str]:
    """Each requirement with its hashes, which follow on indented lines."""
    entry = ""
    for line in text.splitlines(keepends=True):
        if line.startswith("#"):
            continue
        if not line[0].isspace() and entry:
            yield entry
            entry = ""
        entry += line
    if entry:
        yield entry


def _pin(entry: str) -> Pin:
    requirement, *hashes = entry.replace("\\\n", " ").split("--hash=")
    return Pin(Requirement(requirement.strip()), tuple(each.strip() for each in hashes))


def _is_place(entry: str) -> bool:
    return entry.startswith("-") or "://" in entry


def _pins(text: str) -> list[Pin]:
    return [_pin(entry) for entry in _entries(text) if not _is_place(entry)]


def _applies(marker: Marker | None, environment: dict[str, str]) -> bool:
    return marker is None or marker.evaluate(environment)


def faults(project: dict[str, Any], texts: dict[str, str]) -> Iterator[str]:
    """How the lock files differ from what ``pyproject.toml`` asks for, or from what a lock must be."""
    for name, text in texts.items():
        places = [entry for entry in _entries(text) if _is_place(entry)]
        pins = _pins(text)
        if digest_line(project) not in text.splitlines():
            yield f"{name} was made from other requirements than those of pyproject.toml: run ./task lock"
        for place in places:
            yield f"{name} names a place to find packages: {place.strip()}"
        for pin in pins:
            if pin.name in UNLOCKED or pin.name.startswith(("nvidia-", "cuda-")):
                yield f"{name} locks {pin.name}, which differs between PyTorch's builds"
            if not pin.hashes:
                yield f"{name} has no hash for {pin.name}"
        for environment in environments(project):
            where = f"Python {environment['python_full_version']} on {environment['platform_machine']}"
            here = [pin for pin in pins if _applies(pin.requirement.marker, environment)]
            asked = [Requirement(text) for text in requirements_of(project, dev=name == DEV)]
            for requirement in (each for each in asked if _applies(each.marker, environment)):
                if canonicalize_name(requirement.name) not in UNLOCKED:
                    yield from _misfits(name, where, requirement, here)
    if RUNTIME in texts and DEV in texts:
        # Markers may be wider there: what tests need may need a package on more platforms.
        in_dev = {(pin.name, pin.requirement.specifier, pin.hashes) for pin in _pins(texts[DEV])}
        for pin in _pins(texts[RUNTIME]):
            if (pin.name, pin.requirement.specifier, pin.hashes) not in in_dev:
                yield f"{DEV} does not hold {pin.name}{pin.requirement.specifier} as {RUNTIME} does"


def _misfits(name: str, where: str, requirement: Requirement, pins: list[Pin]) -> Iterator[str]:
    found = [pin for pin in pins if pin.name == canonicalize_name(requirement.name)]
    if len(found) != 1:
        yield f"{name} has {len(found)} versions of {requirement.name} for {where}, instead of one"
    for pin in found:
        if not requirement.specifier.contains(pin.version, prereleases=True):
            yield f"{name} has {pin.name} {pin.version}, but {requirement.specifier} is asked for"


def read(root: Path = ROOT) -> dict[str, str]:
    """The committed files; "" where there is none."""
    paths = {name: root / name for name in (RUNTIME, DEV)}
    return {name: path.read_text(encoding="utf-8") if path.exists() else "" for name, path in paths.items()}


def main(argv: list[str] | None = None) -> int:
    """Renew or check. Exit codes: 0 done, 1 not."""
    parser = argparse.ArgumentParser(prog="python -m tools.lock", description="Lock the versions of dependencies.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions instead of those locked now")
    parser.add_argument("--check", action="store_true", help="only say how the files differ from pyproject.toml")
    options = parser.parse_args(argv)
    project = read_project()
    if options.check:
        found = list(faults(project, read()))
        print("\n".join(found) or "lock: the lock files agree with pyproject.toml")
        return int(bool(found))
    try:
        with tempfile.TemporaryDirectory() as home:
            texts = make(project, Path(home), upgrade=options.upgrade)
    except (Unresolvable, NoIndex) as error:
        print(f"lock: {error}", file=sys.stderr)
        return 1
    for name, text in texts.items():
        (ROOT / name).write_text(text, encoding="utf-8")
        print(f"lock: {name}, {len(list(_entries(text)))} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
