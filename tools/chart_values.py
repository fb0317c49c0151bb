"""Write the chart's README: its values with defaults and descriptions, taken from the comments in ``values.yaml``.

``python -m tools.chart_values`` writes it; a test checks that what is committed is what this makes, and that no value
lacks a description.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[1] / "infra" / "chart" / "thermocline"

_HEAD = """# Helm chart of Thermocline

[How to run on Kubernetes](../../../docs/how-to/kubernetes.md) goes through an installation,
[how to scale](../../../docs/how-to/scale.md) through what can be changed while it runs, and
[ADR 0016](../../adr/0016-a-pod-is-a-node.md) says why a pod of a pool holds a storage and its workers.

## Values

Made by `python -m tools.chart_values` from `values.yaml`. `values.schema.json` refuses what is not here. Each entry of
`pools` has a `name` and may override anything that `poolDefaults` has.

| value | default | meaning |
|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Value:
    """One value: its path with dots, its default, and the comment above it (empty if there is none)."""

    path: str
    default: Any
    description: str


def chart_values(text: str) -> list[Value]:
    """Every value of ``values.yaml`` in its order; a mapping that is empty or stands on one line is one value."""
    root = yaml.compose(text)
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("values.yaml is not a mapping")
    return _values(root, text.splitlines(), prefix="")


def _values(node: yaml.MappingNode, lines: list[str], prefix: str) -> list[Value]:
    found: list[Value] = []
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            found += _values(value, lines, prefix=f"{path}.")
        else:
            found.append(Value(path, _plain(value), _comment_above(lines, key.start_mark.line)))
    return found


def _plain(node: yaml.Node) -> Any:
    return yaml.safe_load(yaml.serialize(node))


def _comment_above(lines: list[str], line: int) -> str:
    """The comment that ends right above ``line``, as one paragraph."""
    first = line
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return " ".join(text.strip().lstrip("#").strip() for text in lines[first:line])


def readme(values: list[Value]) -> str:
    """The whole page."""
    rows = []
    for value in values:
        default = json.dumps(value.default, ensure_ascii=False).replace("|", "\\|")
        rows.append(f"| `{value.path}` | `{default}` | {value.description.replace('|', chr(92) + '|')} |\n")
    return _HEAD + "".join(rows)


def main() -> None:
    """Write README.md beside ``values.yaml``."""
    values = chart_values((CHART / "values.yaml").read_text(encoding="utf-8"))
    (CHART / "README.md").write_text(readme(values), encoding="utf-8")


if __name__ == "__main__":
    main()
