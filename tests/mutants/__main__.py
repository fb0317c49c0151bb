"""``./task test:mutants``: put one fault at a time into a copy of the code, and see whether a test fails.

The copy lies in a temporary folder, so the checkout is never changed. Exit codes: 0 when exactly the mutants that the
list expects to survive did, 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import hypothesis  # noqa: F401 - so that forked runs have it.
import numpy as np  # noqa: F401
import pytest
import torch  # noqa: F401

from tests.mutants.listed import LIST, Group, Mutant, mutated, read

ROOT = Path(__file__).parents[2]
COPIED = ("bench", "services", "shared", "thermocline", "tools", "tests", "pyproject.toml")
TIMEOUT_S = 300
MOST_BYTES = 16 * 2**30
"""Address space of a run, because a fault may fill a list without end. PyTorch maps much that it never uses."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Try the listed mutants.")
    parser.add_argument("names", nargs="*", help="parts of names of mutants or files; all mutants without")
    options = parser.parse_args(argv)
    unknown = [name for name in options.names if not any(is_chosen(group, name) for group in read())]
    if unknown:
        parser.error(f"no mutant and no file is called {', '.join(unknown)}; {LIST} lists them")
    failed = False
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = copy_code(Path(folder))
        for group in read():
            chosen = [each for each in group.mutants if not options.names or is_any(group, each, options.names)]
            if not chosen:
                continue
            if has_failed(copy, group.tests):
                print(f"{group.file}: its tests fail without any mutant")
                failed = True
                continue
            for mutant in chosen:
                failed |= not is_as_listed(copy, group, mutant)
    return 1 if failed else 0


def is_chosen(group: Group, name: str) -> bool:
    """Whether a name on the command line chooses any mutant of the group."""
    return any(is_any(group, each, [name]) for each in group.mutants)


def is_any(group: Group, mutant: Mutant, names: Sequence[str]) -> bool:
    return any(name in mutant.name or name in group.file for name in names)


def copy_code(folder: Path) -> Path:
    """Copy what tests of single parts need; returns ``folder``."""
    ignored = shutil.ignore_patterns("__pycache__", "golden", "recordings", "node_modules")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


def is_as_listed(copy: Path, group: Group, mutant: Mutant) -> bool:
    """Try one mutant and print what became of it."""
    path = copy / group.file
    source = path.read_text(encoding="utf-8")
    path.write_text(mutated(source, mutant), encoding="utf-8")
    try:
        killed = has_failed(copy, group.tests)
    finally:
        path.write_text(source, encoding="utf-8")
    is_right = killed != bool(mutant.survives)
    verdict = "killed" if killed else "survived"
    note = f" (listed: {mutant.survives})" if mutant.survives else ""
    print(f"{'ok  ' if is_right else 'WRONG'} {verdict:8} {group.file}: {mutant.name}{note}", flush=True)
    return is_right


def has_failed(copy: Path, tests: Sequence[str]) -> bool:
    """Whether one of the tests fails in the copy; one that hangs has failed. Raises RuntimeError when none can run."""
    # Forked, so that libraries are imported once for all runs.
    run = get_context("fork").Process(target=_run, args=(copy, tests))
    run.start()
    run.join(TIMEOUT_S)
    if run.is_alive():
        run.kill()
        run.join()
        return True
    # Errors while tests are collected (2) come of a module that cannot be imported with the fault in it.
    if run.exitcode not in (0, 1, 2) and not was_killed(run.exitcode):
        raise RuntimeError(f"pytest ended with {run.exitcode} for {', '.join(tests)}")
    return run.exitcode != 0


def was_killed(code: int | None) -> bool:
    """Whether a process ended by a signal, as one that has no memory left may."""
    return code is not None and code < 0


def _run(copy: Path, tests: Sequence[str]) -> None:
    """Run tests in the copy and end this process; nothing of the checkout may be left in it."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os.chdir(copy)
    sys.path[:] = [str(copy), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    sys.dont_write_bytecode = True  # Equal sizes within one second look like one file to the cache of byte code.
    for name in [name for name in sys.modules if name.partition(".")[0] in COPIED]:
        del sys.modules[name]
    os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


if __name__ == "__main__":
    sys.exit(main())
