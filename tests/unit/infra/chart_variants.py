"""Values under which the chart is looked at: what it is by default, and what it can be."""

from __future__ import annotations

from typing import Any

import yaml

from tools.chart_values import CHART

EVERYTHING: dict[str, Any] = {
    "image": {"tag": "1.2.3", "pullSecrets": ["registry"]},
    "env": [{"name": "OTEL_EXPORTER_OTLP_HEADERS", "valueFrom": {"secretKeyRef": {"name": "otel", "key": "headers"}}}],
    "podLabels": {"azure.workload.identity/use": "true"},
    "podAnnotations": {"linkerd.io/inject": "disabled"},
    "model": {
        "path": "/models/qwen",
        "volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
        "servedName": "qwen",
    },
    "broker": {"servers": ["nats-0.nats:4222", "nats-1.nats:4222"], "scheme": "tls"},
    "nats": {"enabled": False},
    "settings": {
        "common": {"log_level": "warning", "traces": "http://collector.tracing:4318"},
        "gateway": {"max_inflight": 2048},
        "scheduler": {"reserve_fraction": 0.1, "host_writes": "selective", "stream_replicas": 3},
        "storage": {"disk_direct": False},
        "worker": {"verify_host": "sampled", "verify_host_share": 0.5},
    },
    "gateway": {
        "apiKeys": {"secretName": "api"},
        "adminKey": {"secretName": "api"},
        "tenants": {"secretName": "tenants"},
        "tls": {"secretName": "api-tls", "minVersion": "1.3"},
        "apiMetrics": "admin",
        "service": {"type": "LoadBalancer", "annotations": {"example.com/internal": "true"}},
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "annotations": {"nginx.ingress.kubernetes.io/backend-protocol": "HTTPS"},
            "hosts": ["llm.example.com"],
            "tlsSecretName": "llm-tls",
        },
        "resources": {"cpuLimit": "4"},
        "autoscaling": {"enabled": True},
        "nodeSelector": {"example.com/kind": "front"},
        "tolerations": [{"key": "front", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "priorityClassName": "serving",
    },
    "scheduler": {
        "priorityClassName": "serving",
        "tolerations": [{"key": "front", "operator": "Exists"}],
        "nodeSelector": {"example.com/kind": "front"},
    },
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/kv"}},
    "networkPolicy": {
        "gatewayFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}],
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "egress": [{"ports": [{"port": 4318, "protocol": "TCP"}]}],
        "poolEgress": [{"ports": [{"port": 443, "protocol": "TCP"}]}],
    },
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "pools": [
        {"name": "cpu", "workers": 3, "disk": {"enabled": False}, "autoscaling": {"kind": "hpa"}},
        {
            "name": "h100",
            "device": "cuda",
            "tensorParallel": 2,
            "deviceKvMib": 40960,
            "hostKvMib": 65536,
            "storageMemoryMib": 3072,
            "remote": "s3://bucket/kv",
            "remoteSecretName": "s3",
            "encryption": {"secretName": "kv-keys"},
            "share": {
                "engine": "nixl",
                "transports": "rc,tcp",
                "devices": "mlx5_0:1,eth0",
                "firstPort": 22000,
                "lastPort": 22015,
                "rdma": {"resourceName": "rdma/hca", "count": 2},
            },
            "disk": {"storageClassName": "local-nvme", "kvGib": 500, "claimGib": 600},
            "gpu": {"runtimeClassName": "nvidia"},
            "priorityClassName": "serving",
            "autoscaling": {"kind": "keda"},
            "nodeSelector": {"nvidia.com/gpu.product": "H100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        },
        {"name": "single", "device": "cuda", "gpu": {"sharing": "visible"}},
    ],
}

USERS: dict[str, Any] = yaml.safe_load((CHART / "values-users.yaml").read_text())
"""A user of the broker for each kind of process."""

THREE_NODES: dict[str, Any] = yaml.safe_load((CHART / "values-three-nodes.yaml").read_text())
"""Nodes that read one another's host memory."""

SMALL: dict[str, Any] = yaml.safe_load((CHART / "values-small.yaml").read_text())
"""A whole cell on one small machine."""

VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "closed-to-nobody": {"networkPolicy": {"enabled": False}},
    "no-pools": {"pools": []},
    "users": USERS,
    "three-nodes": THREE_NODES,
    "small": SMALL,
}
