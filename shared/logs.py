"""Structured logs: one JSON object (or, on a terminal, one coloured line) per event, on stderr.

Prompts and answers never go into a log.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict


@contextlib.contextmanager
def kept_off_stdout() -> Iterator[None]:
    """Send logs to stderr meanwhile, for commands that set up no logging and print results."""
    earlier = structlog.get_config()["logger_factory"]
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    try:
        yield
    finally:
        structlog.configure(logger_factory=earlier)


def quiet() -> None:
    """Log only errors, to stderr, for commands that report failures in a line of their own."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )


def _unbuffered(stream: TextIO) -> TextIO:
    """Return the stream's file without a buffer, which would keep what it could not write, and write it later."""
    try:
        raw = io.FileIO(stream.fileno(), "w", closefd=False)
    except OSError:  # It stands for a file, and has none.
        return stream
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


class _Outlet:
    """A stream whose lines are lost where it would raise OSError, as on a full disk: a process serves without its log.

    They are counted, and the next line that can be written says how many they were.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ""
        self._lost_lines = 0

    def write(self, text: str) -> None:
        """Keep a part of a line until :meth:`flush`."""
        self._line += text

    def flush(self) -> None:
        """Write the line, or lose it."""
        line, self._line = self._line, ""
        try:
            if self._lost_lines:
                # Of the last line a part may have been written.
                self._put("\n" + _rendered("log_lines_lost", lines=self._lost_lines))
                self._lost_lines = 0
            self._put(line)
        except OSError:
            self._lost_lines += 1
            _count_lost_line()

    def _put(self, line: str) -> None:
        self._stream.write(line)
        self._stream.flush()


def _rendered(event: str, **values: object) -> str:
    """Return the line of a warning, for the code that a logger calls and that cannot call one."""
    line: Any = {"component": "logs", **values, "event": event}
    for processor in structlog.get_config()["processors"]:
        line = processor(None, "warning", line)
    return f"{line}\n"


def _count_lost_line() -> None:
    # Late: commands that log have no metrics, whose library takes long to import.
    from shared.bus import measures

    measures.LOG_LINES_LOST.inc()


class _LibraryHandler(logging.Handler):
    """Logs what libraries log through the standard library as events, ``library_message``."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record, at the nearest level below where its own has no name."""
        try:
            level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)
            log = get_logger(record.name)
            log.log(level, "library_message", message=record.getMessage(), exc_info=record.exc_info)
        except Exception:
            self.handleError(record)


_is_of_service = False


def is_of_service() -> bool:
    """Return whether this process is one of a cell's, and not a command that calls their code."""
    return _is_of_service


def configure(service: str, process_id: str, *, level: str = "info", as_json: bool | None = None) -> None:
    """Set up logging for this process. Every event carries ``service`` and ``id``."""
    global _is_of_service
    _is_of_service = True
    if as_json is None:
        as_json = not sys.stderr.isatty()
    number = logging.getLevelNamesMapping()[level.upper()]
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()

    def named(_logger: object, _method: str, event: EventDict) -> EventDict:
        # Not a variable of the context: threads begin with an empty one.
        return {"service": service, "id": process_id, **event}

    outlet: Any = _Outlet(_unbuffered(sys.stderr))
    structlog.configure(
        processors=[
            named,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(file=outlet),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[_LibraryHandler()])


def bind(**values: str) -> None:
    """Add fields to every event of the current task, and of tasks that it starts from now on."""
    structlog.contextvars.bind_contextvars(**values)


def unbind(*names: str) -> None:
    """Remove fields that :func:`bind` added."""
    structlog.contextvars.unbind_contextvars(*names)


def get_logger(name: str) -> Any:
    """Return a logger; call as ``log.info("event_in_snake_case", key=value)``."""
    # The key cannot be "logger": that is the name of a parameter of structlog's own.
    return structlog.get_logger(component=name)
