"""The comparison of schemas finds every change that breaks old bytes, and lets those through that do not."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from shared.messages.base import Message
from tests.compatibility.instances import instance
from tests.compatibility.schema import Schema, breaks, message_types, schema_of, wire_name


def schema(name: str = "Moved", tag: str | None = None, **fields: object) -> Schema:
    """Of one message with these fields: a type, or a type and a default."""
    parts = [(field, *kind) if isinstance(kind, tuple) else (field, kind) for field, kind in fields.items()]
    made: Any = msgspec.defstruct(name, parts, bases=(Message,), tag=tag, frozen=True, kw_only=True)
    return schema_of([made])


BEFORE = schema(page=int, tier=(str, "disk"), mode=(Literal["a", "b"], "a"))


@pytest.mark.parametrize(
    ("after", "fault"),
    [
        ({}, "Moved is gone"),
        (schema(tag="moved", page=int, tier=(str, "disk"), mode=(Literal["a", "b"], "a")), "Moved is gone"),
        (schema(page=int, mode=(Literal["a", "b"], "a")), "Moved.tier is gone"),
        (schema(page=float, tier=(str, "disk"), mode=(Literal["a", "b"], "a")), "Moved.page cannot be int any more"),
        (schema(page=int, tier=(str, "disk"), mode=(Literal["a"], "a")), "Moved.mode cannot be 'b' any more"),
        (schema(page=int, tier=(str, "host"), mode=(Literal["a", "b"], "a")), "Moved.tier means 'host'"),
        (schema(page=int, tier=str, mode=(Literal["a", "b"], "a")), "Moved.tier means an error"),
        (schema(page=int, new=int, tier=(str, "disk"), mode=(Literal["a", "b"], "a")), "Moved.new is new"),
        (schema(tier=(str, "disk"), page=int, mode=(Literal["a", "b"], "a")), "another order"),
    ],
)
def test_what_breaks_old_bytes_is_found(after: Schema, fault: str) -> None:
    """Each such change is one fault that says what it is."""
    faults = list(breaks(BEFORE, after))

    assert len(faults) == 1
    assert fault in faults[0]


@pytest.mark.parametrize(
    "after",
    [
        BEFORE,
        schema(page=int, tier=(str, "disk"), mode=(Literal["a", "b"], "a"), new=(int, 0)),
        schema(page=int, tier=(str, "disk"), new=(int, 0), mode=(Literal["a", "b"], "a")),
        schema(page=int, tier=(str, "disk"), mode=(Literal["a", "b", "c"], "a")),
        schema(page=int, tier=(str, "disk"), mode=(str, "a")),
        schema(page=int, tier=(str | None, "disk"), mode=(Literal["a", "b"], "a")),
        schema(page=(int, 0), tier=(str, "disk"), mode=(Literal["a", "b"], "a")),
        BEFORE | schema("Other", page=int),
    ],
)
def test_additions_break_nothing(after: Schema) -> None:
    """A field with a default, a value more, a default where there was none, and another type."""
    assert list(breaks(BEFORE, after)) == []


def nested(**fields: object) -> Schema:
    """Of a message that has another one as a default."""
    parts: list[Any] = [(name, int, value) for name, value in fields.items()]
    inner: Any = msgspec.defstruct("Inner", parts, bases=(Message,), frozen=True, kw_only=True)
    return schema(inner=(inner, inner()))


def test_a_message_that_is_a_default_may_get_further_fields() -> None:
    """Without them it is what it was; another value of one that it had is another message."""
    assert list(breaks(nested(page=1), nested(page=1, more=0))) == []
    assert "Moved.inner means" in "".join(breaks(nested(page=1), nested(page=2, more=0)))
    assert "Moved.inner means" in "".join(breaks(nested(page=1, more=0), nested(page=1)))


def test_instances_have_no_default() -> None:
    """Every field of every message is written, so that none can be lost unnoticed."""
    for each in message_types():
        made, schema_fields = instance(each), schema_of([each])[wire_name(each)].fields
        written = msgspec.to_builtins(made)
        assert [field.name for field in schema_fields] == [name for name in written if name != "type"], each.__name__


def test_every_message_takes_what_it_does_not_know() -> None:
    """A field of a later release is passed over, and a value that is the default is not written."""
    for each in message_types():
        assert not each.__struct_config__.forbid_unknown_fields, each.__name__
        assert each.__struct_config__.omit_defaults, each.__name__
        assert not each.__struct_config__.array_like, each.__name__
