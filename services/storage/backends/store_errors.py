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
_QUERY = re.compile(r"(?<=[^<\s])\?(?!>)[^\s\"'()<>]+")  # Not the declaration of XML.
_ANSWER = re.compile(
    r"status code: (?P<status>\d{3}[^:<]*?)\s*:.*?<Code>(?P<code>[^<]+)</Code>(?:.*?<Message>(?P<message>[^<]*)<)?",
    re.DOTALL,
)

_REQUEST = re.compile(r"Error performing [A-Z]+ (?P<place>https?://[^/\s]+)")
_UNREACHED, _LOST_REDIRECT = "error sending request", "Received redirect without LOCATION"
_CAUSE = re.compile(r"\binner: .*", re.DOTALL)
_QUOTED = re.compile(r'"([^"]*)"')
_MISMATCH = re.compile(r"\b(?:InvalidCertificate|InvalidMessage|Parse)\(.*?\w+[\s,]*\)", re.DOTALL)
_MISMATCHES = {
    "InvalidCertificate": "have this machine trust the authority of the certificate, or name it by SSL_CERT_FILE",
    "InvalidMessage": "the store does not speak TLS there",
    "Parse": "the store does not speak HTTP there",
}
"""What an operator can do, by the library's words for two sides that do not understand each other."""

_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_FULL_STATUS = (507,)
_FULL_ERRNO = (28, 122)  # ENOSPC, EDQUOT.
_FULL_CODES = ("QuotaExceeded", "StorageFull")
"""Ends of the codes with which Ceph and MinIO refuse an object for which a bucket or the store has no room."""

_WAYS_OUT = {
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY",
    "ExpiredToken": "give the storage new credentials and start it again",
    "InvalidToken": "check AWS_SESSION_TOKEN",
    "RequestTimeTooSkewed": "set the clock of this machine",
    "AccessDenied": "give these credentials the rights to get, put, list and delete objects",
    "NoSuchBucket": "make the bucket, which a storage does not, or correct --remote",
    "AuthorizationHeaderMalformed": "set AWS_REGION to the region of the bucket",
}
"""What an operator can do, by the code of a store's answer."""
_RETRIED_4XX = (408, 425, 429)
_RETRIED_CODES = ("RequestTimeout", "SlowDown", "Throttling", "ThrottlingException")
"""Codes of answers of status 4xx that mean no more than a busy store or a slow connection."""
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
    found, answer = _OS_ERROR.search(str(error)), _ANSWER.search(str(error))
    if answer and answer["code"].endswith(_FULL_CODES):
        return True
    return _status(error) in _FULL_STATUS or bool(found and int(found[1]) in _FULL_ERRNO)


def fault_of(error: Exception) -> Fault:
    """Translate an exception. Changes it: secrets in its text (a signed query) are removed, so that no log has them."""
    is_without_room, is_retried, is_lasting = is_full(error), _is_retried(error), _is_lasting(error)
    text = _redact(error)
    if is_without_room:
        return Fault("full", text)
    if isinstance(error, TimeoutError | concurrent.futures.TimeoutError | asyncio.TimeoutError):
        return Fault("timed_out", "no answer in time")
    if isinstance(error, PermissionDeniedError | UnauthenticatedError | FileNotFoundError | PermissionError):
        return Fault("permanent", text)
    if is_retried:
        return Fault("transient", text)
    if is_lasting:
        return Fault("permanent", text)
    status = _status(error)
    if status is not None and (status in _UNREPEATED_5XX or (status < 500 and status not in _RETRIED_4XX)):
        return Fault("permanent", text)
    return Fault("transient", text)


def _status(error: Exception) -> int | None:
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _is_retried(error: Exception) -> bool:
    answer = _ANSWER.search(str(error))
    return bool(answer and answer["code"] in _RETRIED_CODES)


def _is_lasting(error: Exception) -> bool:
    return _LOST_REDIRECT in str(error) or bool(_MISMATCH.search(_cause(str(error))))


def _cause(text: str) -> str:
    """Return the part of the library's dump that says why a request did not get through, "" without one."""
    found = _CAUSE.search(text)
    return found[0] if found else ""


def _redact(error: Exception) -> str:
    # The library appends a dump of its own structures, which may hold a signed URL.
    text, _, dump = str(error).partition("\n\nDebug source:")
    request = _REQUEST.search(text)
    if answer := _ANSWER.search(text):
        # The library puts the request before it, which would hide what the store says.
        told = f"status code: {answer['status']}: {answer['code']}: {answer['message'] or ''}".rstrip(": ")
        way_out = _WAYS_OUT.get(answer["code"], "")
        text = f"{told} ({way_out})" if way_out else told
    elif "status code: " in text:
        text = text[text.index("status code: ") :].rstrip(": ")
    elif _LOST_REDIRECT in text:
        text = f"a redirect to nowhere ({_WAYS_OUT['AuthorizationHeaderMalformed']})"
    elif request and text.endswith(_UNREACHED):
        text = f"no answer from {request['place']}: {_reason(_cause(dump))}"
    text = _QUERY.sub("?…", text)[:_TEXT_CHARS]
    if not isinstance(error, OSError):
        error.args = (text,)
    return text or type(error).__name__


def _reason(cause: str) -> str:
    if found := _MISMATCH.search(cause):
        told = re.sub(r"[\s,]+", "", found[0])
        return f"{told}{')' * (told.count('(') - told.count(')'))} ({_MISMATCHES[told.partition('(')[0]]})"
    return ": ".join(_QUOTED.findall(cause)) or _UNREACHED
