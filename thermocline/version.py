"""``thermocline version``: the release, and the versions of its formats."""

from __future__ import annotations

import json

from shared.arguments import ArgumentParser
from shared.versions import FORMATS, release


def parser() -> ArgumentParser:
    """Return the command line."""
    made = ArgumentParser(prog="thermocline version", description="Print the version.")
    made.add_argument("--json", action="store_true", help="print one JSON object, with the versions of all formats")
    return made


def main(argv: list[str] | None = None) -> int:
    """Print ``thermocline X.Y.Z``; with ``--json`` the versions of all formats as well."""
    options = parser().parse_args(argv)
    if options.json:
        print(
            json.dumps({"thermocline": release(), "formats": {each.name: each.version for each in FORMATS}}, indent=2)
        )
    else:
        print(f"thermocline {release() or '(not installed)'}")
    return 0
