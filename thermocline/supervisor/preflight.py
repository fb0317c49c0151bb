"""Checks the settings of all processes before their start, by the processes' own types and rules.

Flags, environment and settings file are read here as each process will read them. PyTorch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.gateway.checks import check as check_gateway
from services.gateway.config import GatewayConfig
from services.scheduler.checks import check as check_scheduler
from services.scheduler.config import SchedulerConfig
from services.storage.checks import check as check_storage
from services.storage.checks import directory_faults
from services.storage.config import StorageConfig
from services.worker.checks import check as check_worker
from services.worker.config import WorkerConfig
from shared.broker import PASSWORD_VARIABLE
from shared.config import FaultySettings, from_command_line
from shared.errors import ConfigError
from thermocline.supervisor.child import ChildSpec
from thermocline.supervisor.commands import FLAGS_FROM, service_of

CONFIGS: Mapping[str, type[Any]] = {
    "scheduler": SchedulerConfig,
    "storage": StorageConfig,
    "worker": WorkerConfig,
    "gateway": GatewayConfig,
}


def faults_of(children: Sequence[ChildSpec], environ: Mapping[str, str]) -> list[str]:
    """Return all faults in the settings of ``children``, each once, with its service.

    ``environ`` is that of the process that starts them.
    """
    found: dict[str, str] = {}
    for child in children:
        service = service_of(child)
        for fault in _faults_of(service, child, {**environ, **child.env}):
            found.setdefault(fault, service)  # A fault that several services find is reported for the first.
    return [f"{service}: {fault}" for fault, service in found.items()]


def _faults_of(service: str, child: ChildSpec, environ: Mapping[str, str]) -> Iterator[str]:
    try:
        config = from_command_line(CONFIGS[service], service, child.argv[FLAGS_FROM:], environ=environ)
    except FaultySettings as error:
        yield from error.each()
        if error.rest is None:
            return
        config = error.rest
    except ConfigError as error:
        yield from error.each()
        return
    for check in (_check, _check_broker):
        try:
            check(config, environ)
        except ConfigError as error:
            yield from error.each()


def _check(config: Any, environ: Mapping[str, str]) -> None:
    match config:
        case SchedulerConfig():
            check_scheduler(config)
        case WorkerConfig():
            check_worker(config)
        case GatewayConfig():
            check_gateway(config)
        case StorageConfig():
            faults = directory_faults("--disk-dir", config.disk_dir)
            try:
                check_storage(config, environ)
            except ConfigError as error:
                faults += error.each()
            if faults:
                raise ConfigError.of(faults)


def _check_broker(config: Any, environ: Mapping[str, str]) -> None:
    """Check the files of secrets and certificates, without connecting to the broker."""
    files = (config.nats_ca, config.nats_cert, config.nats_password_file, config.nats_token_file)
    lacks_password = config.nats_user and not environ.get(PASSWORD_VARIABLE)
    if any(files) or config.nats_credentials or lacks_password:
        from shared.bus.access import access_of

        access_of(config, environ)
