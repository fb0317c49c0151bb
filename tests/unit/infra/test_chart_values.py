"""The chart's README lists every value, and values.yaml explains each."""

from __future__ import annotations

import json
from typing import Any

import yaml

from tools.chart_values import CHART, chart_values, readme, users_values


def test_values_are_found_with_defaults_and_comments() -> None:
    """Nested mappings become dotted paths; a comment belongs to the value right below it."""
    text = "# A page.\n\n# Size of\n# it.\nsize: 3\ngroup:\n  # One line.\n  inline: {a: 1}\n  bare: x\n"

    found = [(value.path, value.default, value.description) for value in chart_values(text)]

    assert found == [("size", 3, "Size of it."), ("group.inline", {"a": 1}, "One line."), ("group.bare", "x", "")]


def test_every_value_is_explained() -> None:
    """Values of the NATS chart that stand under one comment are explained there; each other one has a sentence."""
    lacking = [value.path for value in chart_values((CHART / "values.yaml").read_text()) if not value.description]

    assert all(path == "pools" or path.startswith("nats.config.merge.") for path in lacking), lacking


def test_the_readme_is_what_the_tool_makes() -> None:
    """Run ``python -m tools.chart_values`` after a change of values.yaml."""
    assert (CHART / "README.md").read_text() == readme(chart_values((CHART / "values.yaml").read_text()))


def test_the_users_are_those_that_the_command_makes() -> None:
    """Run ``python -m tools.chart_values`` after a change of what a process may."""
    assert (CHART / "values-users.yaml").read_text() == users_values()


def test_the_schema_knows_every_value_and_no_other() -> None:
    """Paths of the schema are those of values.yaml; the NATS chart checks its own."""
    schema = json.loads((CHART / "values.schema.json").read_text())

    def paths(node: dict[str, Any], prefix: str) -> set[str]:
        if "$ref" in node:
            *_, name = node["$ref"].split("/")
            node = schema["$defs"][name]
        if not node.get("properties"):
            return {prefix}
        return {
            path for name, part in node["properties"].items() for path in paths(part, f"{prefix}.{name}".strip("."))
        }

    def given(node: Any, prefix: str) -> set[str]:
        if not isinstance(node, dict) or not node:
            return {prefix}
        return {path for name, part in node.items() for path in given(part, f"{prefix}.{name}".strip("."))}

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    known = {path for path in paths(schema, "") if path.partition(".")[0] not in ("nats", "global")}
    assert known == {path for path in given(values, "") if path.partition(".")[0] != "nats"}


def test_an_entry_of_pools_may_say_what_pool_defaults_says() -> None:
    """And its name, nothing else."""
    definitions = json.loads((CHART / "values.schema.json").read_text())["$defs"]

    assert set(definitions["pool"]["properties"]) == {"name", *definitions["poolValues"]["properties"]}
