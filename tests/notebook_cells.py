"""A notebook's code cells in a plain interpreter, without a network: ``python -m tests.notebook_cells FILE``.

Prints one JSON object a cell: what it printed, and the picture that its last expression is, as notebooks show it.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import socket
import sys
from pathlib import Path
from typing import Any

FAMILIES = (socket.AF_INET, socket.AF_INET6)


def no_network(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook that refuses to connect to anything but this machine's own sockets, and to ask for a name."""
    if event == "socket.getaddrinfo" or (event == "socket.connect" and arguments[0].family in FAMILIES):
        raise PermissionError(f"a notebook needs no network: {event}")


def run_cell(source: str, names: dict[str, Any]) -> dict[str, str]:
    """Run one cell; returns ``printed`` and ``picture``, "" where there is none."""
    *body, last = ast.parse(source).body
    value = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
        else:
            exec(compile(ast.Module([last], []), "<cell>", "exec"), names)
    draw = getattr(value, "_repr_svg_", None)
    return {"printed": printed.getvalue(), "picture": draw() if draw else ""}


def main(path: Path) -> None:
    """Run the cells one after another, in one set of names."""
    sys.addaudithook(no_network)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            print(json.dumps(run_cell("".join(cell["source"]), names)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
