"""``thermocline COMMAND``, guarded from its first import on: Ctrl-C prints no traceback, however early it comes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shared.guard import guarded


def main(argv: list[str] | None = None) -> int:
    """Run one command, that of the process's own command line where ``argv`` is None.

    Exit codes: 2 invalid command line, 130 Ctrl-C, 141 broken pipe, else that of the command.
    """
    if argv is None:
        return guarded(lambda: _run(sys.argv[1:], is_own_process=True))
    return _run(list(argv), is_own_process=False)


def _run(arguments: Sequence[str], *, is_own_process: bool) -> int:
    from thermocline.dispatch import run_command  # Imported here, under the guard.

    return run_command(arguments, is_own_process=is_own_process)


if __name__ == "__main__":
    sys.exit(main())
