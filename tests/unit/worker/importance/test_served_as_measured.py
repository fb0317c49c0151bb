"""A gateway demands a quality gate of what workers do; services share no code, so it repeats some of their defaults."""

from __future__ import annotations

import msgspec

from services.gateway.config import GatewayConfig
from services.gateway.importance_gate import SERVED_METHOD, UNNAMED_METRIC
from services.worker.config import WorkerConfig
from services.worker.evaluation.methods.registry import DEFAULT_METRIC, Method
from services.worker.importance.metrics import metric_named
from thermocline.evaluation.__main__ import parser


def test_gateway_worker_and_evaluation_have_the_same_defaults() -> None:
    """A gate that was measured without flags is good for a cell that was started without any."""
    gateway, worker = (
        {field.name: field.default for field in msgspec.structs.fields(kind)} for kind in (GatewayConfig, WorkerConfig)
    )
    options = parser().parse_args([])
    measured = {"importance_probe_heads": options.probe_heads, "importance_alpha": options.alpha}

    assert {name: gateway[name] for name in measured} == measured
    assert {name: worker[name] for name in measured} == measured


def test_the_gateway_reads_the_name_of_a_method_as_the_evaluation_does() -> None:
    """A method without a metric is one with a default that both sides know."""
    assert UNNAMED_METRIC == DEFAULT_METRIC
    assert Method.named(SERVED_METHOD).metric == metric_named(UNNAMED_METRIC)
