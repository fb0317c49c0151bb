"""Digests of a class's decisions, also in another process: ``python -m thermocline.testing.other_process``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import subprocess
import sys
from functools import reduce
from typing import Any

from services.scheduler.core.cache.eviction import Policy
from thermocline.testing.broken import ContractBroken, require
from thermocline.testing.registered import Decides
from thermocline.testing.simulated import run_cell
from thermocline.testing.walks import digest_of_walks

PATIENCE_S = 120.0
WALKS = 10


def digest_of(kind: type[Decides]) -> str:
    """Return a digest of a class's decisions: of walks for a policy, else of a simulated cell's end."""
    if issubclass(kind, Policy):
        return digest_of_walks(kind, WALKS)
    return hashlib.blake2b(run_cell(kind)[0], digest_size=16).hexdigest()


def digest_elsewhere(kind: type[Decides]) -> str:
    """Return :func:`digest_of` from a process with another hash seed.

    Raises ContractBroken where that fails: the class must be at the top of a module that can be imported there.
    """
    require("<" not in kind.__qualname__, f"{kind.__qualname__} must be defined at the top of a module")
    module = sys.modules[kind.__module__]
    hash_seed = 2 if os.environ.get("PYTHONHASHSEED") == "1" else 1
    found = subprocess.run(
        [sys.executable, "-m", __name__, kind.__module__, kind.__qualname__, module.__file__ or ""],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if found.returncode:
        last = (found.stderr.strip().splitlines() or ["no message"])[-1]
        raise ContractBroken(f"{kind.name}: fails in a process of its own: {last}")
    return found.stdout.strip()


def _load(module_name: str, file: str) -> Any:
    """Return the module by its name, or from its file where a test runner has its own way of importing."""
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError:
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
        return module


def main() -> int:
    """Print the digest of the class whose module, qualified name and file are the arguments."""
    module_name, qualified, file = sys.argv[1:]
    print(digest_of(reduce(getattr, qualified.split("."), _load(module_name, file))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
