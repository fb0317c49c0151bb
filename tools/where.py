"""The tests of a module: ``python -m tools.where services.worker.shell``, or with its path.

Those are the tests that lie where it lies and have its name, and those that import it themselves.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import defaultdict
from pathlib import Path

from tools.unused import PROGRAMS, ROOT, SHIPPED, modules


def folder(module: str) -> str:
    """Where the unit tests of a module lie, or those of a package's own names."""
    package = module.rpartition(".")[0]
    top, _, rest = package.partition(".")
    return f"tests/unit/{(rest if rest and top in ('services', 'shared') else package).replace('.', '/')}"


def imported(path: Path, wanted: set[str]) -> set[str]:
    """Which of the ``wanted`` modules a file imports."""
    text = path.read_text("utf-8")
    if not any(all(part in text for part in each.rpartition(".")) for each in wanted):
        return set()  # Reading its text takes a hundredth of the time that parsing it takes.
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & wanted


def paths_of(module: str, root: Path = ROOT) -> dict[str, str]:
    """Paths of the tests of a module, with why."""
    found = {}
    for path in (root / "tests").rglob("test_*.py"):
        name = path.relative_to(root).as_posix()
        if name == f"{folder(module)}/test_{module.rpartition('.')[2]}.py":
            found[name] = "mirrors it"
        elif imported(path, {module}):
            found[name] = "imports it"
    return found


def misplaced(root: Path = ROOT) -> dict[str, str]:
    """Unit tests that are named for a module of their service and lie elsewhere, with where they belong."""
    called = defaultdict(set)
    for module in modules(root, (*SHIPPED, *PROGRAMS)):
        called[f"test_{module.rpartition('.')[2]}"].add(module)
    found = {}
    for file in (root / "tests" / "unit").rglob("test_*.py"):
        path = file.relative_to(root)
        namesakes = imported(file, called[path.stem])
        places = {folder(each) for each in namesakes} | {f"{folder(each)}/{path.stem[5:]}" for each in namesakes}
        same_part = sorted(place for place in places if place.split("/")[:3] == list(path.parts[:3]))
        if same_part and str(path.parent) not in places:
            found[str(path)] = same_part[0]
    return found


def main(argv: list[str] | None = None) -> int:
    """Exit code 1: nothing tests it by itself. Exit code 2: there is no such module."""
    parser = argparse.ArgumentParser(prog="python -m tools.where", description=__doc__)
    parser.add_argument("module", nargs="+", help="such as services.worker.shell")
    wanted = parser.parse_args(argv).module
    known = modules(ROOT, (*SHIPPED, *PROGRAMS))
    names = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in wanted}
    if not names or any(name not in known for name in names):
        print("usage: python -m tools.where MODULE..., such as services.worker.shell", file=sys.stderr)
        return 2
    tests = {path: why for name in names for path, why in paths_of(name).items()}
    for path, why in sorted(tests.items()):
        print(f"{path}  {why}")
    return 0 if tests else 1


if __name__ == "__main__":
    sys.exit(main())
