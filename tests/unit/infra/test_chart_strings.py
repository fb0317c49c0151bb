"""Every string of the values arrives in the objects as it was written, whatever YAML would make of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest

pytest.importorskip("helm_python", reason="Helm's engine has no wheel for this platform")

from tests.unit.infra.chart_rendering import CHART, Manifest, render
from tests.unit.infra.chart_variants import EVERYTHING

HOSTILE = [
    "a #b",
    "a: b",
    "*a",
    "{a",
    "- a",
    "007",
    "1.0e+3",
    "true",
    "~",
    "a\"b'c\\d",
    " a ",
    "a\tb\nc",
    "é\u2028\x7f",
]
WORD = re.compile(r"plain(\d+)word")

STARTS = {
    "model.path": "/", "model.mountPath": "/", "remote": "s3://", "autoscaling.prometheusUrl": "http://",
}  # fmt: skip
"""What the schema asks a value to begin with, by the end of its path."""

BOUND = {
    "fullnameOverride": "a DNS label by its pattern, and a part of most names",
    "kubeVersion": "rendered nowhere",
    "name": "a DNS label by its pattern, and a part of most names",
    "interval": "digits and a unit by its pattern",
    "cpuRequest": "a number by its pattern",
    "cpuLimit": "a number by its pattern",
    "storageCpu": "a number by its pattern",
}
"""Values whose pattern leaves no room, by their last part."""

Place = tuple[str | int, ...]
"""Keys and indices from the root of the values to one of them."""


def strings() -> list[Place]:
    """Values that may be any string by the schema; those of pools are those of the first."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    def walk(node: dict[str, Any], place: Place) -> Iterator[Place]:
        if "$ref" in node:
            target: Any = schema
            for part in node["$ref"].removeprefix("#/").split("/"):
                target = target[part]
            node = target
        if node.get("type") == "string":
            yield place
        elif node.get("type") == "array":
            yield from walk(node["items"], (*place, 0))
        for name, part in node.get("properties", {}).items():
            if place or name not in ("nats", "global", "poolDefaults", "settings"):
                yield from walk(part, (*place, name))

    return [place for place in walk(schema, ()) if place[-1] not in BOUND]


def dotted(place: Place) -> str:
    return ".".join(str(part) for part in place if part != 0)


def values_with(word: Callable[[Place], str], *, has_credentials: bool) -> dict[str, Any]:
    """Values with everything on, whose strings are words; those of pools are in every pool."""
    values = deepcopy(EVERYTHING)
    for place in strings():
        start = next((start for end, start in STARTS.items() if dotted(place).endswith(end)), "")
        pools = range(len(values["pools"])) if place[0] == "pools" else [0]
        for number in pools:
            _put(values, (place[0], number, *place[2:]) if place[0] == "pools" else place, start + word(place))
    if not has_credentials:
        values["broker"]["credentials"]["secretName"] = ""
    return values


def _put(node: Any, place: Place, text: str) -> None:
    first, *rest = place
    if isinstance(first, int) and not rest:
        node[:] = [text]
    elif not rest:
        node[first] = text
    else:
        below = node[first] if isinstance(first, int) else node.setdefault(first, [] if rest[0] == 0 else {})
        _put(below, tuple(rest), text)


def plain(has_credentials: bool) -> list[Manifest]:
    """Objects in which every string of the values is a plain word of its own."""
    words = {place: f"plain{number}word" for number, place in enumerate(strings())}
    return render(values_with(words.__getitem__, has_credentials=has_credentials))


def replaced(node: Any, text: str) -> Any:
    """Replace each plain word in a manifest's keys and values."""
    if isinstance(node, dict):
        return {replaced(key, text): replaced(value, text) for key, value in node.items()}
    if isinstance(node, list):
        return [replaced(each, text) for each in node]
    return WORD.sub(lambda _: text, node) if isinstance(node, str) else node


def test_every_string_is_looked_at() -> None:
    """Each is rendered with or without the broker's credentials; one that is not has no test below."""
    text = json.dumps([plain(True), plain(False)])

    numbers = {int(number) for number in WORD.findall(text)}
    assert [dotted(place) for number, place in enumerate(strings()) if number not in numbers] == []


@pytest.mark.parametrize("has_credentials", [False, True], ids=["password", "credentials"])
@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_string_arrives_as_it_was_written(hostile: str, has_credentials: bool) -> None:
    """Objects with hostile strings differ from those with plain words only by those strings."""
    found = render(values_with(lambda _: hostile, has_credentials=has_credentials))

    assert found == replaced(plain(has_credentials), hostile)
