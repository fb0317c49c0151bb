"""The hierarchy of errors. Library errors are translated at the boundary, with the cause chained.

::

    ThermoclineError
    ├── CallerError          the caller's fault; retrying the same thing fails again
    │   ├── InvalidRequest       400  malformed or out of range
    │   ├── ContextTooLong       400  prompt and answer do not fit the model's context or the pools
    │   ├── PayloadTooLarge      413
    │   ├── NotAuthenticated     401
    │   ├── NotFound             404  unknown model, route or request
    │   ├── AdapterRefused       400  this LoRA adapter cannot be served exactly; gives reasons
    │   └── DuplicateRequest     409
    ├── CapacityError        no room now; retry later (Retry-After)
    │   ├── QueueFull            429
    │   ├── TooManyConnections   429
    │   ├── RateLimited          429  a tenant's own limit
    │   └── Unavailable          503  no worker, no broker, shutting down
    ├── DeadlineExceeded     504  the request's own deadline passed
    ├── RequestCancelled     499  the client went away
    ├── OperatorError        the operator's fault: a process refuses to start
    │   ├── ConfigError          every fault reported at once (shared/config.py: FaultySettings)
    │   │   └── KeyMissing           no encryption key for this tenant (any more)
    │   ├── UnsupportedModel     this model cannot be served exactly; gives reasons
    │   └── DeviceUnproven       a GPU computes something wrongly, and there is no other way to do it
    └── InternalError        500  our fault
        ├── CodecError           bytes that are no message
        │   └── PolicyMissing        they name a policy, schedule or admission that this process has not loaded
        ├── InvariantViolated    a core found itself in a state that cannot be
        ├── IllegalTransition    a lifecycle table lacks this entry
        ├── IntegrityError       checksum or identity of cached state is wrong
        ├── TransportError       the broker or a pool of another process failed
        │   └── DeviceFailed         this process cannot use a GPU any more: only a new process helps
        ├── SparsePrefixLost     a part of a prefix on the disk cannot be read: the request runs again without it
        ├── RecordingError       truncated or corrupt recording, or one that does not replay
        └── AttemptsExhausted    its workers died too often
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self


class ThermoclineError(Exception):
    """Base of all errors. ``code`` is stable and appears in the API; ``status`` is the HTTP status."""

    code = "internal_error"
    status = 500
    kind = "server_error"  # OpenAI's ``error.type``

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        retry_after_ms: int = 0,
    ) -> None:
        """Take the sentence that callers and logs get.

        ``param`` is the field of the request at fault, None for no single one. ``code`` and ``status`` replace those
        of the class. ``retry_after_ms`` is how long a caller should wait before it tries again; 0 names no time.
        """
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms
        if code is not None:
            self.code = code
        if status is not None:
            self.status = status


class CallerError(ThermoclineError):
    """The caller's fault: repeating the same request fails again."""

    code, status, kind = "invalid_request", 400, "invalid_request_error"


class InvalidRequest(CallerError):
    """A malformed request, or one with a value out of range (400)."""

    code = "invalid_request"


class ContextTooLong(CallerError):
    """Prompt and answer do not fit the model's context or the pools (400)."""

    code = "context_length_exceeded"


class PayloadTooLarge(CallerError):
    """A message or body beyond a limit of size, such as the broker's ``max_payload`` (413)."""

    code, status = "payload_too_large", 413


class NotAuthenticated(CallerError):
    """An API key that is missing or unknown (401)."""

    code, status, kind = "invalid_api_key", 401, "authentication_error"


class NotFound(CallerError):
    """An unknown model, route or request (404)."""

    code, status, kind = "not_found", 404, "not_found_error"


class AdapterRefused(CallerError):
    """A LoRA adapter that cannot be served exactly; the message gives the reasons (400)."""

    code = "adapter_refused"


class DuplicateRequest(CallerError):
    """A request whose id belongs to a request that is running (409)."""

    code, status = "duplicate_request", 409


class CapacityError(ThermoclineError):
    """No room now: the caller may retry later, after ``retry_after_ms``."""

    code, status, kind = "unavailable", 503, "server_error"


class QueueFull(CapacityError):
    """The cell's queue is at one of its bounds (429)."""

    code, status, kind = "queue_full", 429, "rate_limit_error"


class TooManyConnections(CapacityError):
    """More connections than the process accepts at once (429)."""

    code, status, kind = "too_many_requests", 429, "rate_limit_error"


class RateLimited(CapacityError):
    """A tenant is at one of its own limits (429)."""

    code, status, kind = "rate_limit_exceeded", 429, "rate_limit_error"


class Unavailable(CapacityError):
    """No worker, no broker, no answer in time, or a process that shuts down (503)."""

    code = "service_unavailable"


class DeadlineExceeded(ThermoclineError):
    """The request's own deadline passed (504)."""

    code, status, kind = "deadline_exceeded", 504, "timeout_error"


class RequestCancelled(ThermoclineError):
    """The client went away, or asked for the end (499)."""

    code, status, kind = "cancelled", 499, "cancelled_error"


class OperatorError(ThermoclineError):
    """The operator's fault: a process refuses to start, with exit code 2."""

    code = "operator_error"


class ConfigError(OperatorError):
    """Wrong settings or files. ``faults`` are the single sentences that the message is made of."""

    code = "config_error"
    faults: tuple[str, ...] = ()

    @classmethod
    def of(cls, faults: Iterable[str]) -> Self:
        """Return one error for all of ``faults``, repeats left out."""
        each = tuple(dict.fromkeys(faults))
        error = cls("; ".join(each))
        error.faults = each
        return error

    def each(self) -> tuple[str, ...]:
        """Return the single faults, at least one."""
        return self.faults or (self.message,)


class KeyMissing(ConfigError):
    """A tenant has no encryption key, or has it no longer: its chunks are neither written nor read."""

    code = "key_missing"


class UnsupportedModel(OperatorError):
    """A model that cannot be served exactly; the message gives the reason."""

    code = "unsupported_model"


class DeviceUnproven(OperatorError):
    """No way of doing some part of the work passed its proof on a device."""

    code = "device_unproven"


class InternalError(ThermoclineError):
    """Our own fault: a defect, or a failure of another process (500)."""


class CodecError(InternalError):
    """Bytes that are not a valid message of the expected type."""

    code = "codec_error"


class PolicyMissing(CodecError):
    """A snapshot or recording cannot be folded without the code of a policy, schedule or admission."""

    code = "policy_missing"

    @classmethod
    def of(cls, where: str, what: str) -> Self:
        """Return the error for ``where`` (a snapshot, a recording) that names ``what``, a policy and its name."""
        return cls(f"{where} names {what}, which is not registered here: install the package that has it")


class InvariantViolated(InternalError):
    """A core's state that cannot be: a defect, never a caller's fault."""

    code = "invariant_violated"


class IllegalTransition(InternalError):
    """A transition that a lifecycle table has no entry for."""

    code = "illegal_transition"


class IntegrityError(InternalError):
    """Cached state whose checksum or identity is wrong."""

    code = "integrity_error"


class TransportError(InternalError):
    """A failure of the broker, or of a pool of another process."""

    code = "transport_error"


class DeviceFailed(TransportError):
    """The CUDA context of this process is broken; every later call of it would fail."""

    code = "device_failed"


class SparsePrefixLost(InternalError):
    """A part of a request's prefix on the disk could not be read. The request can run again by another way."""

    code = "sparse_prefix_lost"


class RecordingError(InternalError):
    """A recording that is truncated or corrupt, or that replays to other outputs."""

    code = "recording_error"


class AttemptsExhausted(InternalError):
    """A request whose workers died too often, or that failed too often."""

    code = "attempts_exhausted"


def _subclasses(root: type[ThermoclineError]) -> list[type[ThermoclineError]]:
    found = []
    for child in root.__subclasses__():
        found += [child, *_subclasses(child)]
    return found


def error_for_code(code: str, message: str, *, retry_after_ms: int = 0) -> ThermoclineError:
    """Return the typed error for a notice's code; for an unknown code an InternalError with that code."""
    # From the leaves up: a group may share its code with one of its members. A class without a code of its own is a
    # detail of the module that raises it.
    for kind in reversed(_subclasses(ThermoclineError)):
        if kind.code == code and "code" in vars(kind):
            return kind(message, retry_after_ms=retry_after_ms)
    return InternalError(message, code=code)


def reason_of(error: Exception) -> str:
    """Return the system's text for a failed file or connection, without numbers and paths, or the error's own text."""
    strerror = getattr(error, "strerror", None)
    return str(strerror) if strerror else str(error)
