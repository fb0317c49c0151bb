"""What this project stands on: bounded, as installed, under licences that we may ship with, and not known to be bad.

    python -m tools.dependency_audit

It needs no network: what is known to be bad is in ``known_bad.toml`` beside this file, which people keep. pip-audit
asks the databases of advisories themselves; ``./task audit`` runs it as well where it is installed.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
KNOWN_BAD = Path(__file__).with_name("known_bad.toml")

# Licences under which anybody may use, change and pass on what they cover, beside a program of any licence.
PERMISSIVE = re.compile(
    r"\b(mit|0?bsd|apache|isc|psf|python software foundation|unlicense|zlib|mpl|mozilla public license|cc0)\b"
)
# What asks for more than that, also where it stands beside one of those.
DEMANDING = re.compile(r"gpl|general public|sspl|busl|business source|commercial|proprietary")


@dataclass(frozen=True, slots=True)
class Bad:
    """Versions that must not be installed, and by which advisory."""

    package: str
    versions: SpecifierSet
    advisory: str


def declared(project: dict[str, Any]) -> list[Requirement]:
    """What ``pyproject.toml`` asks for, for running and for development."""
    texts = [*project["dependencies"], *(text for group in project["optional-dependencies"].values() for text in group)]
    return [Requirement(text) for text in texts]


def known_bad() -> list[Bad]:
    entries = tomllib.loads(KNOWN_BAD.read_text(encoding="utf-8"))["bad"]
    return [Bad(canonicalize_name(e["package"]), SpecifierSet(e["versions"]), e["advisory"]) for e in entries]


def unbounded(requirements: list[Requirement]) -> Iterator[str]:
    """Requirements that a release of somebody else can change under us."""
    for requirement in requirements:
        signs = {each.operator for each in requirement.specifier}
        if not (signs & {"==", "~="} or (signs & {"<", "<="} and signs & {">", ">="})):
            yield f"{requirement.name} has no lower and upper bound in pyproject.toml"


def misfits(requirements: list[Requirement], installed: dict[str, str]) -> Iterator[str]:
    """Packages that are installed in versions that we did not ask for."""
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        version = installed.get(canonicalize_name(requirement.name))
        if version is None:
            yield f"{requirement.name} is not installed"
        elif not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} {version} is installed, but {requirement.specifier} is asked for"


def bad_versions(installed: dict[str, str], bad: list[Bad]) -> Iterator[str]:
    for each in bad:
        version = installed.get(each.package)
        if version is not None and each.versions.contains(version, prereleases=True):
            yield f"{each.package} {version} is known to be bad: {each.advisory}"


def closure(requirements: list[Requirement]) -> dict[str, set[str]]:
    """The installed packages that these need, themselves included, and which of them each needs itself: by itself or by
    one of its extras that is asked for.
    """
    found: dict[str, set[str]] = {}
    waiting = [(requirement, extra) for requirement in requirements for extra in (requirement.extras or {""})]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # Of another platform, or optional.
        own = found.setdefault(name, set())
        for need in map(Requirement, needs):
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                own.add(canonicalize_name(need.name))
                waiting += [(need, each) for each in (need.extras or {""})]
    return {name: own & found.keys() for name, own in found.items()}


def licence(name: str) -> str:
    """What a package says about its licence: the expression, the classifiers, or else the first line of its text."""
    told = metadata.metadata(name)
    if "License-Expression" in told:
        return str(told["License-Expression"])
    classifiers = [each for each in told.get_all("Classifier", []) if each.startswith("License ::")]
    named = "; ".join(each.rpartition(" :: ")[2] for each in classifiers)
    return named or str(told.get_all("License", [""])[0]).split("\n")[0]


def unlicensed(names: set[str], accepted: dict[str, str]) -> Iterator[str]:
    """Packages whose licence is not plainly permissive. ``accepted`` maps patterns of names to reasons."""
    for name in sorted(names):
        told = licence(name)
        is_permissive = PERMISSIVE.search(told.lower()) and not DEMANDING.search(told.lower())
        if not is_permissive and not any(fnmatch(name, pattern) for pattern in accepted):
            yield f"{name} is under {told or 'a licence that it does not name'}: not known to be permissive"


def audit() -> list[str]:
    """Every fault."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = tomllib.loads(KNOWN_BAD.read_text(encoding="utf-8"))
    requirements = declared(project)
    shipped = closure([Requirement(text) for text in project["dependencies"]])
    installed: dict[str, str] = {
        canonicalize_name(each.metadata["Name"]): each.version for each in metadata.distributions()
    }
    return [
        *unbounded(requirements),
        *misfits(requirements, installed),
        *bad_versions(installed, known_bad()),
        *unlicensed(set(shipped), table["licences"]),
    ]


def main() -> int:
    """Print every fault. Exit codes: 0 none, 1 some."""
    # There are no flags, but --help must not run it.
    argparse.ArgumentParser(description=__doc__).parse_args()
    faults = audit()
    print("\n".join(faults) or "dependency audit: no fault")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
