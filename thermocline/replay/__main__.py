"""``thermocline replay FILE [--policy NAME] [--set KEY=VALUE ...] [--json]``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from services.scheduler import replay as exact
from services.scheduler.outside import load_all
from shared.arguments import ArgumentParser
from shared.errors import ThermoclineError
from shared.guard import guarded
from shared.progress_line import shown
from thermocline.flags import policies_line
from thermocline.replay.what_if import WhatIf, what_if
from thermocline.simulate.settings import changes_of

_PIPED_WIDTH = 120
EXIT_OK, EXIT_DIFFERS, EXIT_BAD = exact.EXIT_EQUAL, exact.EXIT_DIFFERS, exact.EXIT_BAD_FILE


def show(console: Console, path: Path, answer: WhatIf) -> None:
    """Print a table of the figures and their change, and a line that explains its columns."""
    settings = ", ".join(f"{name}={value}" for name, value in answer.changed.items())
    table = Table(title=f"{path.name}: {answer.requests} requests with {settings}", title_justify="left")
    table.add_column("")
    for heading in ("recorded", "simulated as recorded", "simulated what-if", "change"):
        table.add_column(heading, justify="right")
    for name, before in answer.baseline.items():
        after = answer.changed_figures[name]
        change = f"{after - before:+,.2f}" if isinstance(after, float) else f"{after - before:+,}"
        relative = f" ({(after - before) / before:+.1%})" if before else ""
        table.add_row(name, _number(answer.recorded.get(name)), _number(before), _number(after), change + relative)
    console.print(table)
    console.print("The change is between the two simulated columns; the first shows how close the simulation comes.")
    if answer.unplayable:
        console.print(f"{answer.unplayable} requests of the recording had no token and were left out.")


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def parser() -> ArgumentParser:
    """Return the command line."""
    made = ArgumentParser(
        prog="thermocline replay",
        description="Fold a recording again and compare every output; with --policy or --set, ask what if.",
        epilog=policies_line(),
    )
    made.add_argument("file", metavar="FILE", type=Path, help="a recording made by `thermocline record`")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument("--policy", metavar="NAME", help="what if: another eviction policy, a name or module:Class")
    made.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="what if: another cell setting"
    )
    exact.add_load_flag(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run. Exit codes: 0 equal, or what-if answered; 1 an output differs; 2 bad file, settings or arguments."""
    parsed = parser().parse_args(argv)
    if parsed.policy is None and not parsed.settings:
        loads = [f"--load={each}" for each in parsed.load]
        return exact.main([str(parsed.file), *(["--json"] if parsed.json else []), *loads])
    try:
        load_all(parsed.load)
        changes = changes_of(parsed.settings, policy=parsed.policy)
        with shown(f"simulating {parsed.file.name}"):
            answer = what_if(parsed.file, changes)
    except ThermoclineError as error:
        exact.print_failure(error, as_json=parsed.json)
        return EXIT_BAD
    if parsed.json:
        print(json.dumps(msgspec.to_builtins(answer)))
    else:
        console = Console()
        # A file or pipe has no width, so a table gets enough of it.
        show(console if console.is_terminal else Console(width=_PIPED_WIDTH), parsed.file, answer)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(guarded(main))
