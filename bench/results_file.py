"""Write a benchmark's figures with what is needed to run it again: commit, hardware, seed, command."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

RESULTS = Path(__file__).parent / "results"

_FLAGS: dict[str, dict[str, Any]] = {
    "--seed": {"type": int, "default": 1},
    "--save": {"action": "store_true", "help": "write the results file in bench/results too"},
    "--out": {"type": Path, "help": "results file; by default the one in bench/results"},
}


def arguments(doc: str | None, *flags: Literal["--seed", "--save", "--out"]) -> argparse.ArgumentParser:
    """Make a parser of a benchmark's command line that has these of the flags that many have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in flags:
        parser.add_argument(flag, **_FLAGS[flag])
    return parser


def commit_of(repository: Path) -> str:
    """The commit of the code that was measured, with ``-dirty`` where files differ from it; "unknown" without git.

    Results do not count: what a benchmark before this one has written is no other code.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=repository)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude,top)bench/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def hardware() -> dict[str, Any]:
    """What the figures were measured on."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "load_average_1min": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def write(name: str, results: dict[str, Any], *, seed: int, out: Path | None = None) -> Path:
    """Write ``bench/results/<name>.json`` (or ``out``) and return its path."""
    document = {
        "benchmark": name,
        "commit": commit_of(RESULTS.parents[1]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "hardware": hardware(),
        "seed": seed,
        "command": " ".join(["python", *_relative_command()]),
        "results": results,
    }
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Replaced at once: whoever is killed meanwhile leaves the earlier file whole.
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)
    return path


def _relative_command() -> list[str]:
    """The command line without this machine's paths."""
    module = sys.modules["__main__"].__spec__
    script = ["-m", module.name.removesuffix(".__main__")] if module else [Path(sys.argv[0]).name]
    return script + [Path(a).name if a.startswith("/") else a for a in sys.argv[1:]]
