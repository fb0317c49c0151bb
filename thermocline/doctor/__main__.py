"""``thermocline doctor``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from thermocline.doctor.checks import Check, judge
from thermocline.doctor.facts import gather

_MARKS = {"ok": "ok", "note": "note", "bad": "BAD"}


def table(checks: Sequence[Check]) -> str:
    """One line per check, advice below what it is about, and a last line that says it in a sentence."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{_MARKS[check.verdict]:<5} {check.name:<{width}}  {check.found}")
        if check.advice:
            lines.append(f"{'':<5} {'':<{width}}  -> {check.advice}")
    faults = [check.name for check in checks if check.verdict == "bad"]
    lines += ["", f"Not usable yet: {', '.join(faults)}." if faults else "This machine can run Thermocline."]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit code 1 if something keeps Thermocline from working."""
    parser = argparse.ArgumentParser(
        prog="thermocline doctor", description="Check that this machine has what Thermocline needs."
    )
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    checks = judge(gather())
    print(json.dumps([asdict(check) for check in checks], indent=2) if options.json else table(checks))
    return 1 if any(check.verdict == "bad" for check in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
