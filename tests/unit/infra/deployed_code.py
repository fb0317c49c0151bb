"""What the code offers to a deployment: settings of each process, its metrics, and what a probe may ask."""

from __future__ import annotations

import re

import msgspec

from services.gateway import metrics as gateway_metrics
from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.storage.config import StorageConfig
from services.worker.config import WorkerConfig
from shared.broker import PASSWORD_VARIABLE, TOKEN_VARIABLE
from shared.config import load
from shared.metrics import REGISTRY

SETTINGS: dict[str, type[msgspec.Struct]] = {
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "storage": StorageConfig,
    "worker": WorkerConfig,
}

_PREFIX = "THERMOCLINE_"


def settings_from(process: str, arguments: list[str], environment: dict[str, str]) -> msgspec.Struct:
    """What ``thermocline PROCESS`` makes of such flags and variables, values of variables from Kubernetes filled in.

    Fails for a flag or a variable that is no setting. Raises ConfigError for a value that the process refuses.
    """
    kind = SETTINGS[process]
    fields = {field.name for field in msgspec.structs.fields(kind)}
    flags = {}
    for argument in arguments:
        name, _, value = argument.removeprefix("--").partition("=")
        if name != "config":
            flags[name.replace("-", "_")] = re.sub(r"\$\(\w+\)", "cell-0", value)
    ours = {name.removeprefix(_PREFIX).lower() for name in environment if name.startswith(_PREFIX)}
    secrets = {variable.removeprefix(_PREFIX).lower() for variable in (PASSWORD_VARIABLE, TOKEN_VARIABLE)}
    unknown = (set(flags) | ours) - fields - secrets
    assert not unknown, f"{process} has no setting {sorted(unknown)}"
    return load(kind, process, environ=environment, flags=flags)


def gateway_series() -> set[str]:
    """Names of the series that a gateway's ``/metrics`` has; those with labels by the name of their family."""
    # Importing the gateway's metrics has put them into the registry.
    assert gateway_metrics.IN_FLIGHT
    families = list(REGISTRY.collect())
    return {family.name for family in families} | {sample.name for family in families for sample in family.samples}


def metric_names(query: str) -> set[str]:
    """Names of our metrics in a query of Prometheus."""
    return set(re.findall(r"thermocline_\w+", query))
