"""Hurt a cell by many seeded faults, and keep the figures: ``python -m bench.chaos --faults 500``.

Flags are those of ``thermocline chaos``. With ``--faults 0`` it is the soak, and the figures go to ``chaos_soak.json``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from bench import results_file
from thermocline.chaos.__main__ import main as chaos


def main(argv: list[str] | None = None) -> int:
    """The exit code of the run; figures are written only of a run that came to its end."""
    flags = sys.argv[1:] if argv is None else argv
    with tempfile.TemporaryDirectory() as folder:
        figures_file = Path(folder) / "figures.json"
        exit_code = chaos([*flags, "--out", str(figures_file)])
        if figures_file.exists():
            figures = json.loads(figures_file.read_text(encoding="utf-8"))
            name = "chaos" if figures["faults"] else "chaos_soak"
            print(f"written: {results_file.write(name, figures, seed=figures['seed'])}")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
