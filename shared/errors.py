"""The hierarchy of errors. Library errors are translated at the boundary, with the cause chained.

::

    ThermoclineError
    ├── CallerError          the caller's fault; retrying the same thing fails again
    │   ├── InvalidRequest       400  malformed or out of range
    │   ├── ContextTooLong       400  prompt and answer do not fit the model's context or the pools
    │   ├── PayloadTooLarge      413
    │   ├── NotAuthenticated     401
    │   ├── NotFound             404  unknown model, route or request
    │   ├── AdapterRefused       400  this LoRA adapter cannot be served exactly; says why
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
    │   ├── UnsupportedModel     this model cannot be served exactly; says why
    │   └── DeviceUnproven       a GPU computes something wrongly, and there is no other way to do it
    └── InternalError        500  our fault
        ├── CodecError           bytes that are no message
        │   └── PolicyMissing        they name a policy, schedule or admission that this process has not loaded
        ├── InvariantViolated    a core found itself in a state that cannot be
        ├── IllegalTransition    a lifecycle table lacks this entry
        ├── IntegrityError       checksum or identity of cached state is wrong
        ├── TransportError       the broker or a pool of another process failed
        │   └── DeviceFailed         a GPU is of no use to this process any more: only a new process helps
        ├── SparsePrefixLost     a part of a prefix on the disk cannot be read: the request runs again without it
        ├── RecordingError       truncated or corrupt recording, or one that does not replay
        └── AttemptsExhausted    its workers died too often
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self


class ThermoclineError(Exception):
    """Base of all. ``code`` is stable and appears in the API; ``status`` is the HTTP status."""

    code = "internal_error"
    status = 500
    kind = "server_error"  # OpenAI's ``error.type``

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_ms: int = 0
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms
        if code is not None:
            self.code = code


class CallerError(ThermoclineError):
    code, status, kind = "invalid_request", 400, "invalid_request_error"


class InvalidRequest(CallerError):
    code = "invalid_request"


class ContextTooLong(CallerError):
    code = "context_length_exceeded"


class PayloadTooLarge(CallerError):
    code, status = "payload_too_large", 413


class NotAuthenticated(CallerError):
    code, status, kind = "invalid_api_key", 401, "authentication_error"


class NotFound(CallerError):
    code, status, kind = "not_found", 404, "not_found_error"


class AdapterRefused(CallerError):
    code = "adapter_refused"


class DuplicateRequest(CallerError):
    code, status = "duplicate_request", 409


class CapacityError(ThermoclineError):
    code, status, kind = "unavailable", 503, "server_error"


class QueueFull(CapacityError):
    code, status, kind = "queue_full", 429, "rate_limit_error"


class TooManyConnections(CapacityError):
    code, status, kind = "too_many_requests", 429, "rate_limit_error"


class RateLimited(CapacityError):
    code, status, kind = "rate_limit_exceeded", 429, "rate_limit_error"


class Unavailable(CapacityError):
    code = "service_unavailable"


class DeadlineExceeded(ThermoclineError):
    code, status, kind = "deadline_exceeded", 504, "timeout_error"


class RequestCancelled(ThermoclineError):
    code, status, kind = "cancelled", 499, "cancelled_error"


class OperatorError(ThermoclineError):
    code = "operator_error"


class ConfigError(OperatorError):
    """``faults`` are the single sentences that the message is made of."""

    code = "config_error"
    faults: tuple[str, ...] = ()

    @classmethod
    def of(cls, faults: Iterable[str]) -> Self:
        """One error for all of ``faults``, each told once."""
        each = tuple(dict.fromkeys(faults))
        error = cls("; ".join(each))
        error.faults = each
        return error

    def each(self) -> tuple[str, ...]:
        """Return the faults, one at least."""
        return self.faults or (self.message,)


class KeyMissing(ConfigError):
    """A tenant has no encryption key, or has it no longer: its chunks are neither written nor read."""

    code = "key_missing"


class UnsupportedModel(OperatorError):
    code = "unsupported_model"


class DeviceUnproven(OperatorError):
    """No way of doing some part of the work passed its proof on a device."""

    code = "device_unproven"


class InternalError(ThermoclineError):
    pass


class CodecError(InternalError):
    code = "codec_error"


class PolicyMissing(CodecError):
    """A snapshot or recording cannot be folded without the code of a policy, schedule or admission."""

    code = "policy_missing"

    @classmethod
    def of(cls, where: str, what: str) -> Self:
        """``where`` (a snapshot, a recording) names ``what``, a policy and its name."""
        return cls(f"{where} names {what}, which is not registered here: install the package that has it")


class InvariantViolated(InternalError):
    code = "invariant_violated"


class IllegalTransition(InternalError):
    code = "illegal_transition"


class IntegrityError(InternalError):
    code = "integrity_error"


class TransportError(InternalError):
    code = "transport_error"


class DeviceFailed(TransportError):
    """The CUDA context of this process is broken; every later call of it would fail."""

    code = "device_failed"


class SparsePrefixLost(InternalError):
    """What a request needs of its prefix on the disk could not be read. It can run again, by another way."""

    code = "sparse_prefix_lost"


class RecordingError(InternalError):
    code = "recording_error"


class AttemptsExhausted(InternalError):
    """A request's workers died too often."""

    code = "attempts_exhausted"


def _subclasses(root: type[ThermoclineError]) -> list[type[ThermoclineError]]:
    found = []
    for child in root.__subclasses__():
        found += [child, *_subclasses(child)]
    return found


def error_for_code(code: str, message: str, *, retry_after_ms: int = 0) -> ThermoclineError:
    """Return the typed error that a notice's code stands for; an unknown code is an InternalError."""
    # From the leaves up: a group may share its code with one of its members. A kind without a code of its own is a
    # detail of the module that raises it.
    for kind in reversed(_subclasses(ThermoclineError)):
        if kind.code == code and "code" in vars(kind):
            return kind(message, retry_after_ms=retry_after_ms)
    return InternalError(message, code=code)


def reason_of(error: Exception) -> str:
    """Return what the system says of a file or a connection, without numbers and paths; else the error's own text."""
    strerror = getattr(error, "strerror", None)
    return str(strerror) if strerror else str(error)
