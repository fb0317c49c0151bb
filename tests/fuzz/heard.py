"""What processes under test say to their operators that they must not have to say."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import structlog


@dataclass
class Heard:
    """Errors that were logged since they were last cleared."""

    errors: list[str] = field(default_factory=list)

    def processor(self, logger: object, method: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
        """Take an event of structlog, and print nothing."""
        if method in ("error", "exception", "critical"):
            self.errors.append(f"logs {event.get('event')}: {event.get('reason') or event.get('exception', '')}")
        raise structlog.DropEvent


class _StandardLog(logging.Handler):
    """uvicorn and asyncio log through the standard library."""

    def __init__(self, heard: Heard) -> None:
        super().__init__(logging.ERROR)
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self._heard.errors.append(f"logs {record.name}: {record.getMessage()}")


@contextlib.contextmanager
def listening() -> Iterator[Heard]:
    """Hear all errors that this process logs until the block ends."""
    heard = Heard()
    before = structlog.get_config()
    structlog.configure(processors=[structlog.processors.format_exc_info, heard.processor])
    handler = _StandardLog(heard)
    logging.getLogger().addHandler(handler)
    try:
        yield heard
    finally:
        logging.getLogger().removeHandler(handler)
        structlog.configure(**before)
