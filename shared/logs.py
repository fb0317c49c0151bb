"""Structured logs: one JSON object (or, on a terminal, one coloured line) per event, on stderr.

Prompts and answers never go into a log.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import structlog


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
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(service=service, id=process_id)
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr, format="%(name)s: %(message)s")


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
