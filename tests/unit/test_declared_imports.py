"""Shipped code imports only what ``pyproject.toml`` asks for by name."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.lock import read_project

ROOT = Path(__file__).parents[2]
OURS = ("services", "shared", "thermocline")
THROUGH_ANOTHER = {"starlette": "fastapi", "huggingface-hub": "transformers"}
"""Libraries that another one is built on and chooses the version of."""


def modules_of(tree: ast.Module) -> Iterator[str]:
    """The first part of each module's name that is imported anywhere in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module.partition(".")[0]


def imported() -> dict[str, Path]:
    """Each library's module that shipped code imports, with one file that does."""
    files = [path for package in OURS for path in sorted((ROOT / package).rglob("*.py"))]
    found = {name: path.relative_to(ROOT) for path in files for name in modules_of(ast.parse(path.read_text("utf-8")))}
    return {name: path for name, path in found.items() if name not in {*sys.stdlib_module_names, *OURS}}


def asked_for() -> set[str]:
    """Names of what is installed with the project or with an extra for its users."""
    project = read_project()
    extras = [texts for extra, texts in project["optional-dependencies"].items() if extra != "dev"]
    return {canonicalize_name(Requirement(text).name) for text in sum(extras, project["dependencies"])}


def test_every_library_that_is_imported_is_asked_for() -> None:
    """A library that comes with another one is gone when that one no longer needs it."""
    distributions = packages_distributions()
    known = {*asked_for(), *THROUGH_ANOTHER}

    missing = {
        name: str(path)
        for name, path in imported().items()
        if known.isdisjoint(map(canonicalize_name, distributions.get(name, [name])))
    }

    assert missing == {}


@pytest.mark.parametrize(("library", "another"), THROUGH_ANOTHER.items())
def test_a_library_that_comes_with_another_is_always_needed_by_it(library: str, another: str) -> None:
    """Not only with one of its extras."""
    needed = [each for each in map(Requirement, requires(another) or []) if each.marker is None]

    assert another in asked_for()
    assert library in {canonicalize_name(each.name) for each in needed}
