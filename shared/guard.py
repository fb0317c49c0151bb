"""Ends of commands without a traceback: by Ctrl-C, or by an output that is closed or takes no more.

Every entry point of a process is ``sys.exit(guarded(main))``. Only the standard library is imported here, so that the
guard is in place before anything slow is imported.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
from collections.abc import Callable

EXIT_FAILED = 1

EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Exit code that a shell reports for a program ended by Ctrl-C."""

EXIT_PIPE_CLOSED = 128 + signal.SIGPIPE
"""Exit code that a shell reports for a program that wrote to a closed pipe."""

_STDOUT, _STDERR = 1, 2

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def guarded(main: Callable[[], int]) -> int:
    """Run ``main``, the whole work of this process, and return its exit code.

    Ctrl-C ends it with 130, a closed pipe at its standard output or error with 141, an output without room, as on a
    full disk, with 1 and one line. Other errors are not touched.
    """
    _replace_missing_streams()
    try:
        try:
            return _flushed(main)
        except BaseException as error:
            if _is_broken_pipe(error) and (_is_closed(_STDOUT) or _is_closed(_STDERR)):
                _discard_output()
                return EXIT_PIPE_CLOSED
            if isinstance(error, OSError) and error.errno in _NO_ROOM and _is_full(_STDOUT):
                _discard(_STDOUT)
                print(f"thermocline: cannot write the output: {error.strerror}", file=sys.stderr)
                return EXIT_FAILED
            raise
    except KeyboardInterrupt:
        if _is_closed(_STDOUT) or _is_closed(_STDERR):
            _discard_output()
        return EXIT_INTERRUPTED
    finally:
        # From here on the interpreter waits for threads and closes files: Ctrl-C ends it at once, by the signal.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _flushed(main: Callable[[], int]) -> int:
    """Run ``main`` and flush its output, also where argparse ends it after ``--help``; return its exit code.

    Raises BrokenPipeError where a help text could not be written.
    """
    try:
        code = main()
    except SystemExit as ending:
        _flush()
        if not ending.code and _is_closed(_STDOUT):
            # argparse ignores a help text that could not be written.
            raise BrokenPipeError from ending
        raise
    _flush()
    return code


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _is_broken_pipe(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(BrokenPipeError) is not None
    return isinstance(error, BrokenPipeError)


def _is_closed(descriptor: int) -> bool:
    """Return whether the reader of a descriptor is gone. Other pipes and sockets of the process do not count."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, event in poll.poll(0))


def _discard_output() -> None:
    for descriptor in (_STDOUT, _STDERR):
        if _is_closed(descriptor):
            _discard(descriptor)


def _discard(descriptor: int) -> None:
    """Redirect an output to /dev/null, for buffered text and for threads that end now."""
    with open(os.devnull, "wb") as nowhere, contextlib.suppress(OSError):
        os.dup2(nowhere.fileno(), descriptor)


def _is_full(descriptor: int) -> bool:
    """Return whether an output takes not even the end of a line. The error may be that of another file."""
    try:
        os.write(descriptor, b"\n")
    except OSError as error:
        return error.errno in _NO_ROOM
    return False


def _replace_missing_streams() -> None:
    """Open missing standard streams on /dev/null.

    Started with ``>&-`` a process has no standard output, and the next file would get its number.
    """
    for descriptor in (0, _STDOUT, _STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is taken, which is this one.
            os.open(os.devnull, os.O_RDWR)
    # Open for as long as the process lives.
    if sys.stdout is None:
        sys.stdout = open(_STDOUT, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(_STDERR, "w", closefd=False)  # noqa: SIM115
