"""One instance of a message type with every field set to something other than its default.

Values follow from the names of type and field on the wire alone, so a new field or type leaves those of the others as
they were.
"""

from __future__ import annotations

import random
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from tests.compatibility.schema import default_of, wire_name

S = TypeVar("S", bound=msgspec.Struct)

_TRIES = 16


def instance(struct: type[S]) -> S:
    """The instance of this type."""
    return _struct(struct, wire_name(struct))


def _struct(struct: type[S], path: str) -> S:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return struct(**{field.name: _field(field, f"{path}.{field.encode_name}") for field in info.fields})


def _field(field: inspect.Field, path: str) -> Any:
    """Raises ValueError for a field that can only have its default."""
    kinds = _alternatives(field.type)
    for number in range(_TRIES):
        value = _value(kinds[number % len(kinds)], random.Random(f"{path} {number}"), path)
        if field.required or value != default_of(field):
            return value
    raise ValueError(f"{path} can have no other value than {default_of(field)!r}")


def _alternatives(kind: inspect.Type) -> list[inspect.Type]:
    """What a value may be other than None, by name. Messages among them are recorded as types of their own too."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return sorted((each for each in kinds if not isinstance(each, inspect.NoneType)), key=repr)


def _value(kind: inspect.Type, chance: random.Random, path: str) -> Any:
    """Raises TypeError for a kind that no message has had so far."""
    match kind:
        case inspect.UnionType():
            return _value(_alternatives(kind)[0], chance, path)
        case inspect.LiteralType():
            return chance.choice(sorted(kind.values, key=repr))
        case inspect.IntType():
            low, high = kind.ge if kind.ge is not None else 1, kind.le if kind.le is not None else 2**40
            return chance.randint(int(low), int(high))
        case inspect.FloatType():
            return chance.randint(1, 999) + 0.5
        case inspect.BoolType():
            return chance.random() < 0.5
        case inspect.StrType():
            return f"text {chance.randint(1, 10**6)} ü"
        case inspect.BytesType():
            return chance.randbytes(16)
        case inspect.StructType():
            return _struct(kind.cls, path)
        case inspect.VarTupleType():
            return tuple(_value(kind.item_type, chance, f"{path}[{place}]") for place in range(2))
        case inspect.TupleType():
            return tuple(_value(each, chance, f"{path}[{place}]") for place, each in enumerate(kind.item_types))
        case inspect.DictType():
            return {_value(kind.key_type, chance, path): _value(kind.value_type, chance, path) for _ in range(2)}
    raise TypeError(f"{path} is a {kind!r}, of which no value can be made yet")
