"""Plain values that a type's decoder takes: samples of every message, made from its own description."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from msgspec import inspect

_TEXTS = ("", "a", "worker-0", "ab" * 16, "length", "float32", "ä\U0001f525", "x" * 40)


def sample(kind: Any, chance: random.Random) -> Any:
    """A value that encodes to what ``kind`` decodes."""
    return _value(inspect.type_info(kind), chance, 0)


def _value(kind: inspect.Type, chance: random.Random, depth: int) -> Any:
    """``depth`` counts the structs around it: far down, collections are empty."""
    if isinstance(kind, inspect.StructType):
        return _struct(kind, chance, depth)
    if isinstance(kind, inspect.UnionType):
        return _value(chance.choice(kind.types), chance, depth)
    if isinstance(kind, inspect.LiteralType):
        return chance.choice(kind.values)
    if isinstance(kind, inspect.BoolType):
        return chance.random() < 0.5
    if isinstance(kind, inspect.IntType):
        return chance.choice((0, 1, 3, 200, 70_000, 2**40))
    if isinstance(kind, inspect.FloatType):
        return chance.choice((0.0, 0.5, -1.0, 1e9))
    if isinstance(kind, inspect.StrType):
        return chance.choice(_TEXTS)
    if isinstance(kind, inspect.BytesType):
        return chance.randbytes(chance.choice((0, 4, 16, 32)))
    if isinstance(kind, inspect.TupleType):
        return [_value(one, chance, depth) for one in kind.item_types]
    count = chance.randrange(3) if depth < 3 else 0
    if isinstance(kind, inspect.DictType):
        return {_key(kind.key_type, chance): _value(kind.value_type, chance, depth) for _ in range(count)}
    if isinstance(kind, inspect.CollectionType):
        return [_value(kind.item_type, chance, depth) for _ in range(count)]
    if isinstance(kind, inspect.NoneType | inspect.AnyType):
        return None
    raise TypeError(f"no sample of {kind}")


def _key(kind: inspect.Type, chance: random.Random) -> Any:
    return _value(kind, chance, 3)


def _struct(kind: inspect.StructType, chance: random.Random, depth: int) -> Any:
    fields = [one for one in kind.fields if one.required or kind.array_like or chance.random() < 0.5]
    values = {one.encode_name: _value(one.type, chance, depth + 1) for one in fields}
    if kind.array_like:
        return ([] if kind.tag is None else [kind.tag]) + list(values.values())
    return ({} if kind.tag is None else {str(kind.tag_field): kind.tag}) | values


def packed_samples(kind: Any, count: int, chance: random.Random) -> list[bytes]:
    """``count`` samples as msgpack, each of which ``kind`` decodes."""
    packed = [msgspec.msgpack.encode(sample(kind, chance)) for _ in range(count)]
    for data in packed:
        msgspec.msgpack.decode(data, type=kind)
    return packed
