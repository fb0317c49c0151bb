"""What a message type looks like on the wire, as plain data that can be kept and compared across releases.

Types and fields go by their names on the wire: Python may call them otherwise.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

import shared.messages
from shared.messages.base import Message

_SCALARS: dict[type[inspect.Type], str] = {
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.BoolType: "bool",
    inspect.StrType: "str",
    inspect.BytesType: "bytes",
    inspect.NoneType: "None",
}


class FieldSchema(msgspec.Struct, frozen=True, array_like=True):
    """``alternatives`` are the types that a value may have, sorted; ``default`` is a repr, "" for a required field."""

    name: str
    alternatives: tuple[str, ...]
    default: str = ""


class MessageSchema(msgspec.Struct, frozen=True, kw_only=True):
    """Fields in the order in which they are written."""

    name: str
    fields: tuple[FieldSchema, ...]


Schema = dict[str, MessageSchema]
"""By name of the type; sorted."""


def wire_name(struct: type[msgspec.Struct]) -> str:
    """The tag by which a message's type is told; the class name of what has none."""
    return str(struct.__struct_config__.tag or struct.__name__)


def message_types() -> list[type[Message]]:
    """Every type of ``shared.messages``, by name."""
    modules = [
        importlib.import_module(f"shared.messages.{info.name}")
        for info in pkgutil.iter_modules(shared.messages.__path__)
    ]
    found = {
        wire_name(value): value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Message) and value is not Message
    }
    return [found[name] for name in sorted(found)]


def schema_of(types: list[type[Message]]) -> Schema:
    return {wire_name(each): _describe(each) for each in types}


def _describe(struct: type[msgspec.Struct]) -> MessageSchema:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    fields = tuple(FieldSchema(field.encode_name, _alternatives(field.type), _default(field)) for field in info.fields)
    return MessageSchema(name=wire_name(struct), fields=fields)


def _default(field: inspect.Field) -> str:
    if field.required:
        return ""
    return repr(default_of(field))


def default_of(field: inspect.Field) -> Any:
    """The value of a field that is not written."""
    return field.default_factory() if field.default is msgspec.NODEFAULT else field.default


def _alternatives(kind: inspect.Type) -> tuple[str, ...]:
    if isinstance(kind, inspect.UnionType):
        return tuple(sorted({text for each in kind.types for text in _alternatives(each)}))
    if isinstance(kind, inspect.LiteralType):
        return tuple(sorted(repr(value) for value in kind.values))
    return (_text(kind),)


def _text(kind: inspect.Type) -> str:
    """One type as text. Raises TypeError for a kind that no message has had so far: describe it here first."""
    if type(kind) in _SCALARS:
        return _SCALARS[type(kind)]
    if isinstance(kind, inspect.StructType):
        return wire_name(kind.cls)
    if isinstance(kind, inspect.VarTupleType):
        return f"tuple[{' | '.join(_alternatives(kind.item_type))}, ...]"
    if isinstance(kind, inspect.TupleType):
        return f"tuple[{', '.join(' | '.join(_alternatives(each)) for each in kind.item_types)}]"
    if isinstance(kind, inspect.DictType):
        return f"dict[{' | '.join(_alternatives(kind.key_type))}, {' | '.join(_alternatives(kind.value_type))}]"
    raise TypeError(f"messages with a {kind!r} are not described yet")


def breaks(old: Schema, new: Schema) -> Iterator[str]:
    """Why bytes written by ``old`` would not be read by ``new`` as what they were."""
    for name, before in old.items():
        after = new.get(name)
        if after is None:
            yield f"{name} is gone"
            continue
        yield from _field_breaks(name, before, after)


def _is_same_default(old: str, new: str) -> bool:
    """Whether a field that is not written means the same. A message may have got further fields, behind the others.

    Those have defaults, as every new field must, and what the message is without them is what it was.
    """
    return new == old or (old.endswith(")") and new.startswith(f"{old[:-1]}, "))


def _field_breaks(name: str, before: MessageSchema, after: MessageSchema) -> Iterator[str]:
    old_fields = {field.name: field for field in before.fields}
    new_fields = {field.name: field for field in after.fields}
    for field_name, old in old_fields.items():
        new = new_fields.get(field_name)
        if new is None:
            yield f"{name}.{field_name} is gone"
            continue
        missing = set(old.alternatives) - set(new.alternatives)
        if _SCALARS[inspect.StrType] in new.alternatives:
            missing = {each for each in missing if not each.startswith("'")}  # A word is a text.
        if missing:
            yield f"{name}.{field_name} cannot be {', '.join(sorted(missing))} any more"
        if old.default and not _is_same_default(old.default, new.default):
            yield f"{name}.{field_name} means {new.default or 'an error'} where it is not written, not {old.default}"
    for field_name, new in new_fields.items():
        if field_name not in old_fields and not new.default:
            yield f"{name}.{field_name} is new and has no default"
    kept = [field_name for field_name in new_fields if field_name in old_fields]
    if kept != [field_name for field_name in old_fields if field_name in new_fields]:
        yield f"the fields of {name} are in another order"
