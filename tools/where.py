"""The tests of a module: ``python -m tools.where services.worker.shell``, or with its path.

Those are the tests that lie where it lies and have its name, and those that import it themselves.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tools.unused import PROGRAMS, ROOT, SHIPPED, parsed


def folder(module: str) -> str:
    """Where the unit tests of a module lie, or those of a package's own names."""
    package = module.rpartition(".")[0]
    top, _, rest = package.partition(".")
    return f"tests/unit/{(rest if rest and top in ('services', 'shared') else package).replace('.', '/')}"


def imported(tree: ast.Module, modules: set[str]) -> set[str]:
    """Which of ``modules`` a file imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & modules


def paths_of(module: str, root: Path = ROOT) -> dict[str, str]:
    """Paths of the tests of a module, with why."""
    found = {}
    for name, tree in parsed(root, ("tests",)).items():
        path = f"{name.replace('.', '/')}.py"
        if not Path(path).name.startswith("test_"):
            continue
        if path == f"{folder(module)}/test_{module.rpartition('.')[2]}.py":
            found[path] = "mirrors it"
        elif imported(tree, {module}):
            found[path] = "imports it"
    return found


def misplaced(root: Path = ROOT) -> dict[str, str]:
    """Unit tests that are named for a module of their service and lie elsewhere, with where they belong."""
    modules = set(parsed(root, (*SHIPPED, *PROGRAMS)))
    found = {}
    for name, tree in parsed(root, ("tests/unit",)).items():
        path = Path(f"{name.replace('.', '/')}.py")
        namesakes = {each for each in imported(tree, modules) if f"test_{each.rpartition('.')[2]}" == path.stem}
        places = {folder(each) for each in namesakes} | {f"{folder(each)}/{path.stem[5:]}" for each in namesakes}
        same_part = sorted(place for place in places if place.split("/")[:3] == list(path.parts[:3]))
        if same_part and str(path.parent) not in places:
            found[str(path)] = same_part[0]
    return found


def main(argv: list[str] | None = None) -> int:
    """Exit code 1: nothing tests it by itself. Exit code 2: there is no such module."""
    wanted = sys.argv[1:] if argv is None else argv
    known = parsed(ROOT, (*SHIPPED, *PROGRAMS))
    names = [name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in wanted]
    if not names or any(name not in known for name in names):
        print("usage: python -m tools.where MODULE..., such as services.worker.shell", file=sys.stderr)
        return 2
    tests = {path: why for name in names for path, why in paths_of(name).items()}
    for path, why in sorted(tests.items()):
        print(f"{path}  {why}")
    return 0 if tests else 1


if __name__ == "__main__":
    sys.exit(main())
