"""``thermocline cache VERB``: find the verb and run it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from shared.arguments import ArgumentParser
from shared.errors import OperatorError, ThermoclineError
from shared.guard import guarded
from thermocline.cache import divergences, flush, ls, pin, prewarm, stat, unpin, verify
from thermocline.flags import add_json

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
VERBS = (ls, stat, divergences, pin, unpin, prewarm, flush, verify)


def parser() -> ArgumentParser:
    """Return the command line."""
    made = ArgumentParser(
        prog="thermocline cache",
        description="List, measure, pin, prewarm, flush and verify a running cell's prefix cache.",
    )
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB")
    for module in VERBS:
        name = module.__name__.rpartition(".")[2]
        verb = verbs.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        add_json(verb)
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 done; 1 the cell is unreachable or refused, or a check failed; 2 bad arguments."""
    arguments = parser().parse_args(argv)
    try:
        is_good: bool = asyncio.run(arguments.run(arguments))
    except ThermoclineError as error:
        print(f"thermocline cache: {error.message}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, OperatorError) else EXIT_FAILED
    except KeyboardInterrupt:
        print("thermocline cache: interrupted", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK if is_good else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(guarded(main))
