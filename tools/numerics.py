"""Whether code that computes KV has changed since the epoch of numerics was thought of: ``python -m tools.numerics``.

Names the sources that differ from those of ``numerics_sources.json``, and exits with 1 if there are any. Whether what
they compute differs in a bit is for whoever changed them to say: then ``shared/numerics.py`` gets the next epoch, and
in either case ``--record`` writes down what was thought of. Comments, docstrings and layout do not count; of libraries
that compute for us, the versions that ``pyproject.toml`` admits do.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from pathlib import Path

import xxhash

from shared.numerics import NUMERICS_EPOCH

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tools" / "numerics_sources.json"

SOURCES = (  # What KV and hidden states follow from, on any device.
    "services/worker/native/*.[ch]",
    "services/worker/native/*.py",
    "shared/native/build.py",
    "shared/native/*.h",
    "services/worker/kernels/*.py",
    "services/worker/kernels/exact/*.py",
    "services/worker/engine/*attention*.py",
    "services/worker/engine/adapters.py",
    "services/worker/engine/fused/*.py",
    "services/worker/engine/fused_gpu/*.py",
    "services/worker/engine/chunks.py",
    "services/worker/engine/quantised/*.py",
    "services/worker/engine/exactness.py",
    "services/worker/engine/key_splits.py",
    "services/worker/engine/latents.py",
    "services/worker/engine/model_loading.py",
    "services/worker/engine/model_runner.py",
    "services/worker/engine/packed_experts.py",
    "services/worker/engine/packed_linear.py",
    "services/worker/engine/pinned_rotations.py",
    "services/worker/engine/planed_step.py",
    "services/worker/engine/states/*.py",
    "services/worker/engine/told_positions.py",
    "services/worker/engine/visibility.py",
    "services/worker/kv/planes.py",
    "services/worker/parallel/collectives.py",
    "services/worker/parallel/rank_model.py",
    "services/worker/parallel/shared_linears.py",
    "services/worker/restore/first_layers.py",
    "services/worker/restore/projection.py",
    "shared/adapters.py",
)
LIBRARIES = ("flashinfer-python", "torch", "transformers", "triton")
PROJECT = "pyproject.toml"

_C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_REQUIREMENT = re.compile(r'"([a-z0-9-]+)(?:\[[a-z,]*\])?([<>=!~][^";]*)')


def sources(root: Path = ROOT) -> dict[str, str]:
    """Digests of sources by their paths, and versions of libraries by their names."""
    paths = sorted({path for pattern in SOURCES for path in root.glob(pattern)})
    found = {str(path.relative_to(root)): _digest(path) for path in paths}
    required = dict(_REQUIREMENT.findall((root / PROJECT).read_text("utf-8")))
    return found | {name: required[name] for name in LIBRARIES if name in required}


def changed(now: dict[str, str], then: dict[str, str]) -> list[str]:
    """What differs, came or went."""
    return sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.numerics", description=__doc__)
    parser.add_argument("--record", action="store_true", help="keep the sources and the epoch as they are now")
    options = parser.parse_args(arguments)
    now = sources()
    if options.record:
        RECORD.write_text(json.dumps({"epoch": NUMERICS_EPOCH, "sources": now}, indent=1) + "\n", "utf-8")
        return 0
    kept = json.loads(RECORD.read_text("utf-8"))
    names = changed(now, kept["sources"])
    if not names and kept["epoch"] == NUMERICS_EPOCH:
        return 0
    print("\n".join(names))
    print(
        f"The epoch of numerics is {NUMERICS_EPOCH}, and was {kept['epoch']} when the sources above were others. If KV "
        "or hidden states may differ in a bit, raise it in shared/numerics.py. Then: python -m tools.numerics --record"
    )
    return 1


def _digest(path: Path) -> str:
    text = path.read_text("utf-8")
    said = _python(text) if path.suffix == ".py" else " ".join(_C_COMMENT.sub(" ", text).split())
    return str(xxhash.xxh3_64_hexdigest(said.encode()))


def _python(text: str) -> str:
    """The code without its docstrings and comments."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_prose(each)]  # type: ignore[attr-defined]
    return _dumped(tree)


def _dumped(part: object) -> str:
    """Return a tree in one form for all versions of Python: ``ast.dump`` shows fields that only some of them have."""
    if isinstance(part, ast.AST):
        fields = [f"{name}={_dumped(value)}" for name, value in ast.iter_fields(part) if value not in (None, [])]
        return f"{type(part).__name__}({', '.join(fields)})"
    return f"[{', '.join(map(_dumped, part))}]" if isinstance(part, list) else repr(part)


def _is_prose(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
