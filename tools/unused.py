"""Public names of shipped packages that no command reaches: ``python -m tools.unused``.

Commands begin at the ``main`` of each ``__main__``, and each definition reaches what it mentions. What only tests,
benchmarks, tools or one another use leaves the shipped packages, or ``EXPLAINED`` says why it stays. What a shipped
decorator takes is used; a module that is handed on or named by a string is used whole. Methods and properties are used
where anything but a test takes such an attribute; those that a library may call are left out.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHIPPED = ("services", "shared", "thermocline")
PROGRAMS = ("tools", "bench")

EXPLAINED = {  # Why names stay that are called so, or lie in what is called so.
    "services.worker.engine.states.carried.CarriedStates": "the library's layers call it as their cache",
    "services.worker.engine.states.layers._Notes": "likewise",
    "services.worker.engine.own_attention._PagedRows": "likewise, layers with an indexer",
    "services.scheduler.policies.thermo.law.pack": "tests say by it what the records pack bit by bit",
    "thermocline.simulate.sweeping.sweep": "notebooks and programs of others sweep by it",
    "services.scheduler.core.hidden.partition": "benchmarks compare closed forms of the paper with what is served",
    "thermocline.documents.linked": "the trainer and benchmarks make documents by it, and neither imports the other",
    "thermocline.testing": "tests of other people's packages call it",
    "services.gateway.tokenizer.Tokenizer.encode_chat": "prompts that are put together are compared with it",
    "shared.ids.chain_page": "the definition of a page's identity, which chain_pages is tested against",
    "shared.memory.host_pool.HostPoolView.verify_layer": "the check of one page that tests of every copy share",
}

Name = tuple[str, str]  # Module and name.


def modules(root: Path, packages: tuple[str, ...]) -> dict[str, Path]:
    """Files of modules by name; a package has its folder's."""
    paths = sorted(path for package in packages for path in (root / package).rglob("*.py"))
    names = [".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return dict(zip(names, paths, strict=True))


def parsed(root: Path, packages: tuple[str, ...]) -> dict[str, ast.Module]:
    """Modules by name, read."""
    return {name: ast.parse(path.read_text("utf-8")) for name, path in modules(root, packages).items()}


def _defined_by(node: ast.stmt) -> list[str]:
    """What a statement at the top of a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


class Definitions:
    """What ``trees`` define at the top of modules, and what each definition mentions."""

    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self._trees = trees
        self._imported: dict[Name, Name] = {}
        self.mentions: dict[Name, set[Name]] = {}
        self.loose: dict[str, set[Name]] = {}  # What a module mentions besides, by module.
        self.roots = {(module, "main") for module in trees if module.endswith("__main__")}
        for module, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom):
                    for alias in node.names:
                        self._imported[module, alias.asname or alias.name] = (node.module or "", alias.name)
        for module, tree in trees.items():
            self.loose[module] = set()
            for statement in tree.body:
                names = _defined_by(statement)
                for name in names:
                    self.mentions.setdefault((module, name), set()).update(self._mentioned(module, statement))
                taking = [node for part in getattr(statement, "decorator_list", ()) for node in ast.walk(part)]
                givers = {self._origin((module, node.id))[0] for node in taking if isinstance(node, ast.Name)}
                if givers & trees.keys() - {module}:
                    self.roots.update((module, name) for name in names)
                if not names and not isinstance(statement, (ast.Import, ast.ImportFrom)):
                    self.loose[module].update(self._mentioned(module, statement))

    def reached(self) -> set[Name]:
        """What commands reach."""
        found, waiting = set[Name](), set(self.roots)
        while waiting:
            name = waiting.pop()
            found.add(name)
            waiting |= (self.mentions.get(name, set()) | self.loose.get(name[0], set())) - found
        return found

    def _mentioned(self, module: str, statement: ast.stmt) -> Iterator[Name]:
        taken_from = set()  # Modules of which an attribute is taken, so that they are not used whole.
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                base = ".".join(self._origin((module, node.value.id)))
                if base in self._trees:
                    taken_from.add(node.value)
                    yield self._origin((base, node.attr))
            elif isinstance(node, ast.Name) and node not in taken_from:
                name = self._origin((module, node.id))
                yield from (name, *self._all_of(".".join(name)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                target, _, function = node.value.partition(":")
                if target in self._trees:
                    yield from [self._origin((target, function))] if function else self._all_of(target)

    def _all_of(self, module: str) -> Iterator[Name]:
        """Everything in a module, if there is one of this name."""
        for statement in self._trees[module].body if module in self._trees else ():
            if isinstance(statement, ast.ImportFrom):
                names = [alias.asname or alias.name for alias in statement.names]
            else:
                names = _defined_by(statement)
            yield from (self._origin((module, name)) for name in names)

    def _origin(self, name: Name) -> Name:
        """Where a name is defined, behind all imports of it."""
        while name in self._imported:
            name = self._imported[name]
        return name


def unused_members(trees: dict[str, ast.Module], others: dict[str, ast.Module], pages: str) -> Iterator[str]:
    """Methods and properties that no module and no template of ``pages`` takes."""
    nodes = [node for tree in (*trees.values(), *others.values()) for node in ast.walk(tree)]
    taken = {node.attr for node in nodes if isinstance(node, ast.Attribute)} | set(re.findall(r"\.(\w+)", pages))
    ours = {node.name for node in nodes if isinstance(node, ast.ClassDef)} | {"Protocol", "Exception"}
    for module, tree in trees.items():
        for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            if all(ast.unparse(base).partition("[")[0] in ours for base in kind.bases):
                members = [each.name for each in kind.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
                yield from (f"{module}.{kind.name}.{name}" for name in members if name not in taken)


def unused(root: Path = ROOT) -> list[str]:
    """All such names, whether explained or not, in order."""
    trees = parsed(root, SHIPPED)
    definitions = Definitions(trees)
    found = [".".join(name) for name in definitions.mentions.keys() - definitions.reached()]
    pages = "".join(path.read_text("utf-8") for path in (root / "docs" / "templates").rglob("*.j2"))
    found += unused_members(trees, parsed(root, PROGRAMS), pages)
    return sorted(name for name in found if not name.rpartition(".")[2].startswith("_"))


def unexplained(names: list[str]) -> list[str]:
    """Of ``names`` those that nothing explains, and what explains no name any more."""
    explained = {each: [name for name in names if f"{name}.".startswith(f"{each}.")] for each in EXPLAINED}
    stale = [f"{each} is explained for nothing" for each, of in explained.items() if not of]
    return sorted(set(names).difference(*explained.values())) + stale


def main() -> int:
    """Print what is not explained; exit code 1 if there is any."""
    # There are no flags, but --help must not run it.
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("\n".join(faults := unexplained(unused())) or "every public name is used, or explained in tools/unused.py")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
