"""How large and how entangled the scheduler's core is, from its code: ``python -m tools.structure``.

Each measure has a target that a test holds. What runs is measured on a fold of its own: a cell of one worker that is
configured as by default, and one request from acceptance to its end.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

import services.scheduler.policies  # noqa: F401  The default policy and schedule are among them.
from services.scheduler import core
from services.scheduler.core.request import Request
from services.scheduler.core.step import Stamped
from shared.messages.base import pack_int32
from shared.messages.cell_events import CellConfig, CellConfigured
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.requests import SamplingParams, SubmitRequest
from shared.messages.worker_events import BatchDone, RequestFinished, WorkerJoined
from shared.messages.worker_plans import RunBatch, WorkerPlan

ROOT = Path(__file__).parents[1]
PACKAGE = "services.scheduler.core"
FOLDER = ROOT / PACKAGE.replace(".", "/")
SMALL = 60
"""Lines below which a module with one importer belongs to that."""

FREE_TO_BE_SMALL = ("policy", "protocol", "registry")
"""Modules that others implement or fill: they may be as small as they are."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure, what it may be at the most, and what it counts."""

    name: str
    value: int
    target: int
    found: tuple[str, ...] = ()

    @property
    def is_met(self) -> bool:
        return self.value <= self.target


def module_name(path: Path) -> str:
    """The dotted name of a file of the core."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def modules() -> dict[str, ast.Module]:
    """The core's modules that define something, by name."""
    parsed = {module_name(path): ast.parse(path.read_text("utf-8")) for path in sorted(FOLDER.rglob("*.py"))}
    return {name: tree for name, tree in parsed.items() if not name.endswith("__init__")}


def imports(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Which modules of the core each module imports when it is imported itself, types alone left out."""
    found: dict[str, list[str]] = {}
    for name, tree in trees.items():
        named: dict[str, None] = {}
        for statement in tree.body:
            if isinstance(statement, ast.ImportFrom) and statement.module is not None:
                for alias in statement.names:
                    whole = f"{statement.module}.{alias.name}"
                    named |= {target: None for target in (whole, statement.module) if target in trees}
        found[name] = list(named)
    return found


def longest_chain(imported: dict[str, list[str]]) -> list[str]:
    """The longest chain of imports, from its top. Raises CycleError where modules import one another in a ring."""
    chains: dict[str, list[str]] = {}
    for name in TopologicalSorter(imported).static_order():
        chains[name] = [name, *max((chains[target] for target in imported[name]), key=len, default=[])]
    return max(chains.values(), key=len)


def lonely(imported: dict[str, list[str]]) -> list[str]:
    """Modules under :data:`SMALL` lines that one module alone imports."""
    importers = Counter(target for targets in imported.values() for target in targets)
    paths = {name: ROOT / (name.replace(".", "/") + ".py") for name in imported}
    return [
        name
        for name, path in paths.items()
        if importers[name] == 1
        and len(path.read_text("utf-8").splitlines()) < SMALL
        and name.rpartition(".")[2] not in FREE_TO_BE_SMALL
    ]


def defined_twice(trees: dict[str, ast.Module]) -> list[str]:
    """Public functions, classes and constants whose name is defined in two modules: one word, two things."""
    homes: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for name in _public_names(tree):
            homes.setdefault(name, []).append(module.removeprefix(f"{PACKAGE}."))
    return [f"{name}: {', '.join(found)}" for name, found in sorted(homes.items()) if len(found) > 1]


def named_twice(trees: dict[str, ast.Module]) -> list[str]:
    """Files of the core that share a name."""
    names = Counter(module.rpartition(".")[2] for module in trees)
    return [name for name, count in names.items() if count > 1]


def _public_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        yield from (name for name in names if not name.startswith("_"))


def calls_of(action: Callable[[], Any]) -> list[str]:
    """Modules of the core in the order in which an action calls into them, one after another without repeats."""
    entered: list[str] = []
    prefix = str(FOLDER) + "/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(prefix) and not frame.f_code.co_name.startswith("<"):
            name = module_name(Path(path))
            if not entered or entered[-1] != name:
                entered.append(name)

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return entered


class PlainCell:
    """A fold of one worker with the default settings, to which nothing was attached that a feature would need."""

    def __init__(self) -> None:
        self._state = core.new_state(remembers=False)
        self._seq = 0
        self._plan = 0
        geometry = KvGeometry(layers=1, kv_heads=1, head_dim=8, page_size=16, dtype="float32")
        pool = PoolHandle(kind="shm", layout="layer_first", name="pool", nbytes=0, pages=64, geometry=geometry)
        self._feed(CellConfigured(config=CellConfig()))
        self._feed(
            WorkerJoined(worker_id="w", incarnation="1", node="n", model="m", pool=pool, max_context=1024),
        )

    def _feed(self, message: Any) -> None:
        self._seq += 1
        for output in core.step(self._state, Stamped(self._seq, self._seq * 1_000_000, message)):
            if isinstance(output, WorkerPlan) and isinstance(output.order, RunBatch):
                self._plan = output.number

    def submit(self, request_id: str = "r") -> None:
        """A request is accepted; the first two are admitted at once and their prompts sent, a third waits."""
        self._feed(
            SubmitRequest(
                request_id=request_id,
                gateway_id="g",
                namespace="0" * 32,
                prompt=pack_int32(range(40)),
                sampling=SamplingParams(max_tokens=4),
            )
        )

    def compute(self) -> None:
        """Its prompt is computed."""
        self._feed(BatchDone(worker_id="w", incarnation="1", plan=self._plan, computed_tokens=40, compute_us=400))

    def finish(self) -> None:
        """Its answer is complete."""
        self._feed(
            RequestFinished(
                worker_id="w", incarnation="1", request_id="r", attempt=1, reason="stop", output=pack_int32([7, 7])
            )
        )

    def run(self) -> None:
        """All three."""
        self.submit()
        self.compute()
        self.finish()


def measures() -> list[Measure]:
    """All of them."""
    trees = modules()
    imported = imports(trees)
    chain = longest_chain(imported)
    flat = [path.name for path in sorted(FOLDER.glob("*.py"))]
    request = tuple(dict.fromkeys(calls_of(PlainCell().run)))
    admitted = calls_of(PlainCell().submit)
    busy = PlainCell()
    busy.submit("a")
    busy.submit("b")
    waiting = calls_of(busy.submit)
    through, sent = tuple(dict.fromkeys(waiting)), tuple(dict.fromkeys(admitted))
    twice, doubles, small = defined_twice(trees), named_twice(trees), lonely(imported)
    return [
        Measure("modules", len(trees), 100),
        Measure("files flat in the core", len(flat), 12, tuple(flat)),
        Measure("longest chain of imports", len(chain), 12, tuple(chain)),
        Measure("modules that a plain request runs", len(request), 30, request),
        Measure("modules that a submitted message runs until it waits", len(through), 15, through),
        Measure("its returns to a module that it left", len(waiting) - len(through), 20, tuple(waiting)),
        Measure("modules that one runs that is admitted at once", len(sent), 23, sent),
        Measure("its returns, batch and pages included", len(admitted) - len(sent), 82, tuple(admitted)),
        Measure("fields of a request", len(msgspec.structs.fields(Request)), 25),
        Measure("public names defined twice", len(twice), 0, tuple(twice)),
        Measure("files of one name", len(doubles), 0, tuple(doubles)),
        Measure("small modules with one importer", len(small), 0, tuple(small)),
    ]


def main() -> int:
    """Print the measures; returns 1 where one misses its target."""
    # There are no flags, but --help must not run it.
    argparse.ArgumentParser(description=__doc__).parse_args()
    found = measures()
    width = max(len(measure.name) for measure in found)
    for measure in found:
        verdict = "" if measure.is_met else "   missed"
        print(f"{measure.name:{width}}  {measure.value:4}  at most {measure.target}{verdict}")
        if not measure.is_met:
            print("\n".join(f"    {item.removeprefix(PACKAGE + '.')}" for item in measure.found))
    return 0 if all(measure.is_met for measure in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
