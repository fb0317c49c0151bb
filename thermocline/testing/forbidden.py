"""Checks for what code that decides may not do: in its source, and while it runs."""

from __future__ import annotations

import ast
import inspect
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from thermocline.testing.broken import ContractBroken

MODULES = (
    "asyncio", "concurrent", "datetime", "multiprocessing", "os", "pathlib", "random", "secrets", "shutil", "socket",
    "subprocess", "tempfile", "threading", "time", "torch", "urllib", "uuid",
)  # fmt: skip
"""Modules with clocks, chance, files, the network or threads, which code that decides may not import."""

CALLS = ("hash", "id", "input", "open", "print")
"""Built-in functions that depend on the process or have effects outside it."""

_CLOCKS = ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "time", "time_ns")
_CHANCE = ("choice", "getrandbits", "randint", "random", "randrange", "sample", "shuffle", "uniform")


def faults_in_source(kind: type[Any]) -> list[str]:
    """Return the forbidden imports, calls and loops over sets in a class's module, each with its line."""
    module = sys.modules[kind.__module__]
    found = []
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        line = getattr(node, "lineno", 0)
        for name in _imported(node):
            if name.partition(".")[0] in MODULES:
                found.append(f"line {line} imports {name}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            found.append(f"line {line} calls {node.func.id}()")
        if isinstance(node, ast.For | ast.comprehension) and _is_set(node.iter):
            found.append(f"line {node.iter.lineno} iterates over a set")
    return found


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [each.name for each in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def _is_set(node: ast.expr) -> bool:
    """Return whether an expression is plainly a set; one in a variable shows only with another hash seed."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("frozenset", "set")
    return isinstance(node, ast.Set | ast.SetComp)


@contextmanager
def no_clock_and_no_chance() -> Iterator[None]:
    """Make every call of a clock in ``time`` and of a draw in ``random`` raise ContractBroken."""
    kept = [(module, name, getattr(module, name)) for module, names in _FORBIDDEN for name in names]
    for module, name, _ in kept:
        setattr(module, name, _refusal(f"{module.__name__}.{name}()"))
    try:
        yield
    finally:
        for module, name, original in kept:
            setattr(module, name, original)


_FORBIDDEN: tuple[tuple[Any, tuple[str, ...]], ...] = ((time, _CLOCKS), (random, _CHANCE))


def _refusal(what: str) -> Any:
    def refuse(*_given: Any, **_named: Any) -> NoReturn:
        raise ContractBroken(f"{what} is called where decisions are made")

    return refuse
