"""Errors that cross the bus."""

from __future__ import annotations

import pytest

from shared.bus.call_errors import as_call_error, decode_error, encode_error
from shared.errors import InternalError, InvalidRequest, QueueFull, ThermoclineError, TransportError, Unavailable


@pytest.mark.parametrize(
    "error",
    [
        QueueFull("full", retry_after_ms=40),
        Unavailable("away"),
        InvalidRequest("no", param="max_tokens"),
        InternalError("of a newer release", code="not_known_here"),
    ],
)
def test_error_survives_the_way_back(error: ThermoclineError) -> None:
    """Type, code, message, parameter and wait are the same at the caller."""
    told = decode_error(encode_error(error))

    assert type(told) is type(error)
    assert (told.code, told.message, told.param, told.retry_after_ms) == (
        error.code,
        error.message,
        error.param,
        error.retry_after_ms,
    )


def test_a_kind_without_a_code_of_its_own_arrives_as_the_kind_above() -> None:
    """Whatever other modules have derived from that, and wherever they were imported."""

    class Detail(InvalidRequest):
        pass

    told = decode_error(encode_error(Detail("no")))

    assert type(told) is InvalidRequest
    assert type(decode_error(encode_error(InvalidRequest("no")))) is InvalidRequest


def test_garbage_is_a_transport_error() -> None:
    """A body that is no error does not raise something untyped at the caller."""
    assert isinstance(decode_error(b"\xff\xff"), TransportError)


def test_foreign_exception_tells_its_type_only() -> None:
    """Details of a bug stay in the log of the process that has it."""
    told = as_call_error(KeyError("token text"))

    assert isinstance(told, InternalError)
    assert "token text" not in told.message
