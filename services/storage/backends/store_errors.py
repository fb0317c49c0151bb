"""The meaning of the object-store library's errors: the only module that knows its exceptions and their wording."""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
from dataclasses import dataclass
from typing import Literal

from obstore.exceptions import AlreadyExistsError, NotSupportedError, PermissionDeniedError, UnauthenticatedError

FaultKind = Literal["transient", "permanent", "full", "timed_out"]

_STATUS = re.compile(r"status code: (\d{3})")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_QUERY = re.compile(r"(?<=[^<\s])\?[^\s\"')]+")

_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_FULL_STATUS = (507,)
_FULL_ERRNO = (28, 122)  # ENOSPC, EDQUOT.
_RETRIED_4XX = (408, 425, 429)
_UNREPEATED_5XX = (501, 505)
_TEXT_CHARS = 800


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an attempt failed. Only ``transient`` ones are worth another attempt."""

    kind: FaultKind
    text: str


def is_missing(error: FileNotFoundError) -> bool:
    """Return whether the object is missing. False: its bucket is, which is a fault of the settings."""
    return not any(phrase in str(error) for phrase in _NO_BUCKET)


def is_empty(error: Exception) -> bool:
    """Return whether the first bytes of an empty object were asked for."""
    return _status(error) == 416 or "StartTooLarge" in str(error)


def is_there_already(error: Exception) -> bool:
    """Return whether a conditional write found the object in place, or another writer at it."""
    return isinstance(error, AlreadyExistsError)


def lacks_conditional_writes(error: Exception) -> bool:
    """Return whether the store, or its configuration, supports no conditional writes."""
    return isinstance(error, NotImplementedError | NotSupportedError) or _status(error) == 501


def is_full(error: Exception) -> bool:
    """Return whether the store has no room."""
    found = _OS_ERROR.search(str(error))
    return _status(error) in _FULL_STATUS or bool(found and int(found[1]) in _FULL_ERRNO)


def fault_of(error: Exception) -> Fault:
    """Translate an exception. Changes it: secrets in its text (a signed query) are removed, so that no log has them."""
    text = _redact(error)
    if isinstance(error, TimeoutError | concurrent.futures.TimeoutError | asyncio.TimeoutError):
        return Fault("timed_out", "no answer in time")
    if isinstance(error, PermissionDeniedError | UnauthenticatedError | FileNotFoundError | PermissionError):
        return Fault("permanent", text)
    status = _status(error)
    if is_full(error):
        return Fault("full", text)
    if status is not None and (status in _UNREPEATED_5XX or (status < 500 and status not in _RETRIED_4XX)):
        return Fault("permanent", text)
    return Fault("transient", text)


def _status(error: Exception) -> int | None:
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _redact(error: Exception) -> str:
    # The library appends a dump of its own structures, which is of no use and may hold a signed URL.
    text = _QUERY.sub("?…", str(error).split("\n\nDebug source:")[0])[:_TEXT_CHARS]
    if not isinstance(error, OSError):
        error.args = (text,)
    return text or type(error).__name__
