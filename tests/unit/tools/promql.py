"""What a query of Prometheus asks for: which series, and by which labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser

from shared.metrics import MetricFacts

OF_PROMETHEUS = {"instance", "job"}
"""Labels that a scrape adds."""


@dataclass(frozen=True)
class Asked:
    """One selector: the name of its series, labels that it compares, and labels that are kept around it."""

    name: str
    compared: frozenset[str]
    kept: frozenset[str]


def asked_by(query: str) -> list[Asked]:
    """Every selector in a query. Raises ValueError for one that is none."""
    return list(_walk(promql_parser.parse(query), frozenset()))


def faults_of(query: str, exported: dict[str, MetricFacts]) -> list[str]:
    """What is wrong with a query about these metrics."""
    try:
        selectors = asked_by(query)
    except ValueError as error:
        return [f"{query}: {error}"]
    faults = []
    for asked in selectors:
        if asked.name == "up":
            continue
        facts = series_of(exported).get(asked.name)
        if facts is None:
            faults.append(f"{query}: nobody exports {asked.name}")
            continue
        known = {*facts.labels, *OF_PROMETHEUS, *({"le"} if asked.name.endswith("_bucket") else ())}
        unknown = (asked.compared | asked.kept) - known
        faults += [f"{query}: {asked.name} has no label {label}" for label in sorted(unknown)]
        is_summed = facts.kind == "counter" or asked.name != facts.name
        if is_summed and "rate(" not in query and "increase(" not in query:
            faults.append(f"{query}: {asked.name} only ever grows, and is asked for as it is")
    return faults


def series_of(exported: dict[str, MetricFacts]) -> dict[str, MetricFacts]:
    """Metrics by the names of their series."""
    series: dict[Any, Any] = {}
    for facts in exported.values():
        if facts.kind == "histogram":
            series |= {f"{facts.name}{end}": facts for end in ("_bucket", "_sum", "_count")}
        else:
            series[facts.series] = facts
    return series


def _walk(node: Any, kept: frozenset[str]) -> Iterator[Asked]:
    match node:
        case promql_parser.VectorSelector():
            assert node.name is not None
            yield Asked(node.name, frozenset(one.name for one in node.matchers.matchers), kept)
        case promql_parser.MatrixSelector():
            yield from _walk(node.vector_selector, kept)
        case promql_parser.AggregateExpr():
            labels = node.modifier.labels if node.modifier is not None else ()
            yield from _walk(node.expr, kept | frozenset(labels))
        case promql_parser.BinaryExpr():
            yield from _walk(node.lhs, kept)
            yield from _walk(node.rhs, kept)
        case promql_parser.Call():
            for argument in node.args:
                yield from _walk(argument, kept)
        case promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            yield from _walk(node.expr, kept)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            pass
        case _:
            raise AssertionError(f"a query holds {type(node).__name__}, which is not understood here")
