"""``thermocline version``: which release this is, and which versions of formats it speaks."""

from __future__ import annotations

import argparse
import json
import sys

from shared.versions import FORMATS, release


def main(argv: list[str] | None = None) -> int:
    """Print ``thermocline X.Y.Z``; with ``--json`` the versions of all formats as well."""
    parser = argparse.ArgumentParser(prog="thermocline version", description="Print the version.")
    parser.add_argument("--json", action="store_true", help="print the versions of formats too, as JSON")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if options.json:
        print(
            json.dumps({"thermocline": release(), "formats": {each.name: each.version for each in FORMATS}}, indent=2)
        )
    else:
        print(f"thermocline {release() or '(not installed)'}")
    return 0
