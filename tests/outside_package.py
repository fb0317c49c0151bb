"""A package of somebody else, written into a folder as an installer would: its module, and what it offers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

MODULE = """
from thermocline.policies import Admission, RankedPolicy, Schedule


class Newest(RankedPolicy):
    name = "newest-first"
    state_version = 3

    def rank(self, node):
        return (-node.id,)


class Backwards(Schedule):
    name = "backwards"

    def puts_aside(self, state, worker, builder, candidate, *, is_first):
        return True

    def order(self, put_aside):
        return put_aside[::-1]


class Short(Admission):
    name = "short-only"

    def admits(self, node, pages, moment):
        return pages < 3
"""
OFFERS = {"newest-first": "strangers:Newest", "backwards": "strangers:Backwards", "short-only": "strangers:Short"}


def write_package(
    folder: Path, module: str = MODULE, offers: Mapping[str, str] = OFFERS, package: str = "strangers"
) -> Path:
    """Install a package of one module into a folder that is to be on the path; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{package}.py").write_text(module, encoding="utf-8")
    if offers:
        told = folder / f"{package}-0.1.0.dist-info"
        told.mkdir(exist_ok=True)
        (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n", encoding="utf-8")
        lines = [f"{name} = {value}" for name, value in offers.items()]
        text = "\n".join(["[thermocline.policies]", *lines, ""])
        (told / "entry_points.txt").write_text(text, encoding="utf-8")
    return folder


def environment(*folders: Path) -> dict[str, str]:
    """The environment of a process that finds packages in these folders beside everything that this one finds."""
    path = [*map(str, folders), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def run_python(
    *arguments: str, folders: tuple[Path, ...] = (), cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, to its end."""
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        env=environment(*folders),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
