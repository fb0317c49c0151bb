"""Record the signatures of FlashInfer that we call, from its source: nothing of it is imported, and no GPU needed.

``python -m tests.cuda.record_flashinfer VERSION DIR`` adds those of the package unpacked in DIR to
``flashinfer_signatures.json``, by which the stand-in binds what it is called with.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

TABLE = Path(__file__).with_name("flashinfer_signatures.json")

DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
CALLED = {
    "decode.py": [f"{DECODE}.{name}" for name in ("__init__", "reset_workspace_buffer", "plan", "run")],
    "prefill.py": [f"{PREFILL}.{name}" for name in ("__init__", "reset_workspace_buffer", "plan", "run")],
    "cascade.py": ["merge_state", "merge_state_in_place"],
}


def main(version: str, directory: str) -> None:
    signatures = {
        name: _parameters(ast.parse((Path(directory) / "flashinfer" / file).read_text()), name)
        for file, names in CALLED.items()
        for name in names
    }
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    TABLE.write_text(json.dumps(table | {version: signatures}, indent=1) + "\n")


def _parameters(tree: ast.Module, name: str) -> str:
    """Names in order; those with a default end in "=", and those behind "*" go by name only."""
    owner, _, method = name.rpartition(".")
    body = tree.body if not owner else next(
        each.body for each in tree.body if isinstance(each, ast.ClassDef) and each.name == owner
    )  # fmt: skip
    functions = {each.name: each for each in body if isinstance(each, ast.FunctionDef)}  # The last overload counts.
    found = functions[method].args
    if found.kwarg is not None:  # It hands its arguments on.
        found = functions[f"_{method}_impl"].args
    required = len(found.args) - len(found.defaults)
    names = [each.arg + "=" * (at >= required) for at, each in enumerate(found.args)]
    by_name = [
        each.arg + "=" * (default is not None)
        for each, default in zip(found.kwonlyargs, found.kw_defaults, strict=True)
    ]
    return " ".join([*names, *(["*", *by_name] if by_name else [])])


if __name__ == "__main__":
    main(*sys.argv[1:])
