"""Write the chart's README, its values with defaults and descriptions, taken from the comments in ``values.yaml``; and
``values-users.yaml``, which tells the chart's broker of a user for each kind of process.

``python -m tools.chart_values`` writes both; tests check that what is committed is what this makes, and that no value
lacks a description.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from thermocline.broker.passwords import OPERATOR
from thermocline.broker.permissions import ANY
from thermocline.broker.users import User, authorization, cell_users, variable

CHART = Path(__file__).parents[1] / "infra" / "chart" / "thermocline"

_HEAD = """# Helm chart of Thermocline

[How to run on Kubernetes](../../../docs/how-to/kubernetes.md) describes an installation,
[how to scale](../../../docs/how-to/scale.md) changes to a running cell, and
[ADR 0016](../../adr/0016-a-pod-is-a-node.md) why a pod of a pool holds a storage and its workers.

## Values

Made by `python -m tools.chart_values` from `values.yaml`. `values.schema.json` refuses other values. Each entry of
`pools` has a `name` and may override any value of `poolDefaults`.

| value | default | meaning |
|---|---|---|
"""


_USERS_HEAD = """\
# A user of the chart's broker for each kind of process, with what it needs and nothing else. Made by
# `python -m tools.chart_values` from what `thermocline broker-config` makes.
#
#   helm install cell infra/chart/thermocline --values infra/chart/thermocline/values-users.yaml
#
# The secret of broker.secretName has five keys then: gateway, scheduler, storage, worker, and password, which is the
# operator's, for people and their commands.

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


def users_values() -> str:
    """The whole of values-users.yaml."""
    users = cell_users([ANY], [ANY])
    secret = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["broker"]["secretName"]
    # Between such marks stands what the chart of NATS leaves unquoted, so that the server looks it up.
    block = authorization(users, {user.name: f"<< ${variable(user.name)}_QUOTED >>" for user in users})
    env: dict[str, Any] = {}
    for user in users:
        name = variable(user.name)
        env[name] = {"valueFrom": {"secretKeyRef": {"name": secret, "key": _secret_key(user)}}}
        # Between quotes: the server reads what begins with digits as a number. Kubernetes fills in the variable.
        env[f"{name}_QUOTED"] = f"'$({name})'"
    values = {
        "broker": {"perProcess": True},
        "nats": {
            "config": {"merge": {"authorization": block}},
            "container": {"env": env},
        },
    }
    text: str = yaml.safe_dump(values, sort_keys=False, width=120)
    return _USERS_HEAD + text


def _secret_key(user: User) -> str:
    # What a broker with a single user is started with is the operator's here, too.
    return "password" if user.name == OPERATOR else user.name


def main() -> None:
    """Write README.md and values-users.yaml beside ``values.yaml``."""
    # There are no flags, but --help must not run it.
    argparse.ArgumentParser(description=__doc__).parse_args()
    values = chart_values((CHART / "values.yaml").read_text(encoding="utf-8"))
    (CHART / "README.md").write_text(readme(values), encoding="utf-8")
    (CHART / "values-users.yaml").write_text(users_values(), encoding="utf-8")


if __name__ == "__main__":
    main()
