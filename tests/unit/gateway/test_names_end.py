"""A name with a newline at its end is no name: some become parts of a subject, a path or a log line."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from services.gateway.cross_origin import is_origin
from services.gateway.keys import check_given_key, is_key_hash, key_hash
from services.gateway.openai_schema.cache import FlushRequest, PinRequest
from services.gateway.tenants import Tenant, name_fault
from shared.adapters import is_adapter_name
from shared.errors import InvalidRequest
from shared.ids import is_valid_name
from shared.memory.segment_name import parse_segment_name


def is_converted(schema: type, field: str) -> Callable[[str], bool]:
    """A check of one field of a schema."""

    def check(text: str) -> bool:
        try:
            msgspec.convert({field: text}, schema)
        except msgspec.ValidationError:
            return False
        return True

    return check


def is_given_key(text: str) -> bool:
    try:
        check_given_key(text)
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize(
    ("is_valid", "text"),
    [
        (is_valid_name, "name"),
        (is_adapter_name, "name"),
        (is_origin, "https://chat.example"),
        (is_key_hash, key_hash(b"key")),
        (is_given_key, "k" * 40),
        (lambda text: not name_fault(text), "acme"),
        (is_converted(Tenant, "salt"), "a" * 16),
        (is_converted(FlushRequest, "namespace"), "0" * 32),
        (is_converted(FlushRequest, "tenant"), "acme"),
        (is_converted(PinRequest, "name"), "pin"),
        (lambda text: parse_segment_name(text) is not None, "cell.12-34.worker-0.0123abcd"),
    ],
)
def test_a_newline_at_the_end_is_not_overlooked(is_valid: Callable[[str], bool], text: str) -> None:
    """As it is by a pattern that ends in $."""
    assert is_valid(text)
    assert not is_valid(text + "\n")
    assert not is_valid("\n" + text)
