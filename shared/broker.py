"""The broker's settings: one group, the same for every process and command.

Secrets are in files, or in the variables ``THERMOCLINE_NATS_PASSWORD`` and ``THERMOCLINE_NATS_TOKEN``; there are no
flags for them, because every user of the machine can read a command line. ``shared.bus.access`` turns the settings
into what the client needs.
"""

from __future__ import annotations

import argparse
import os
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from shared import config
from shared.config import ENVIRONMENT_PREFIX, NATS_URL

SCHEMES = ("nats", "tls")

PASSWORD_VARIABLE = ENVIRONMENT_PREFIX + "NATS_PASSWORD"
TOKEN_VARIABLE = ENVIRONMENT_PREFIX + "NATS_TOKEN"


class BrokerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the broker, inherited by each process's own.

    A ``__post_init__`` of those that checks more calls ``broker_faults``, too.
    """

    nats: Annotated[tuple[str, ...], Meta(description="NATS servers (nats:// or tls://), separated by commas")] = (
        NATS_URL,
    )
    nats_ca: Annotated[
        str,
        Meta(description="PEM file of authorities that the broker's certificate may come from; empty: the system's"),
    ] = ""
    nats_cert: Annotated[str, Meta(description="PEM file of our own certificate, where the broker asks for one")] = ""
    nats_key: Annotated[str, Meta(description="PEM file of its private key")] = ""
    nats_server_name: Annotated[
        str, Meta(description="name that the broker's certificate must carry; empty: the host of its URL")
    ] = ""
    nats_user: Annotated[str, Meta(description="user at the broker")] = ""
    nats_password_file: Annotated[
        str, Meta(description="file that holds the user's password; without it THERMOCLINE_NATS_PASSWORD has it")
    ] = ""
    nats_token_file: Annotated[
        str, Meta(description="file that holds a token in the place of user and password; or THERMOCLINE_NATS_TOKEN")
    ] = ""
    nats_credentials: Annotated[
        str, Meta(description="credentials of decentralised NATS accounts: a .creds file, or the seed of an nkey")
    ] = ""
    nats_least_payload_bytes: Annotated[
        int, Meta(description="a broker whose max_payload is less is refused at the start", ge=0)
    ] = 2**20
    nats_pending_bytes: Annotated[
        int, Meta(description="messages of one subscription that may wait; more are dropped and recovered", ge=2**20)
    ] = 64 * 2**20

    def __post_init__(self) -> None:
        """Raise ValueError that names every contradiction among the settings."""
        faults = self.broker_faults()
        if faults:
            raise ValueError("; ".join(faults))

    def broker_faults(self) -> list[str]:
        """Return the contradictions among these settings, one line each."""
        faults = []
        if not self.nats:
            faults.append("--nats names no server")
        for number, url in enumerate(self.nats, 1):
            # By number, not by text: the URL may hold a password.
            if not _is_server(url):
                faults.append(f"--nats: server {number} is not nats://host:port or tls://host:port")
        if bool(self.nats_cert) != bool(self.nats_key):
            faults.append("--nats-cert and --nats-key need each other")
        if self.nats_password_file and not self.nats_user:
            faults.append("--nats-password-file needs --nats-user")
        ways = {
            "--nats-user": self.nats_user,
            "--nats-token-file": self.nats_token_file,
            "--nats-credentials": self.nats_credentials,
        }
        given = [flag for flag, value in ways.items() if value]
        if len(given) > 1:
            faults.append(f"{' and '.join(given)} exclude each other")
        return faults


def _is_server(url: str) -> bool:
    """Return whether ``url`` names a NATS server; a bare ``host:port`` does, too."""
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        return parts.scheme in SCHEMES and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def add_broker_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of BrokerSettings to a command that has no settings of its own; ``broker_of`` reads them."""
    group = parser.add_argument_group("broker", "also as variables, such as THERMOCLINE_NATS")
    config.add_fields(group, BrokerSettings)


def broker_of(parsed: argparse.Namespace) -> BrokerSettings:
    """Return the settings of a parsed command line and the environment. Raises ConfigError."""
    flags = {field.name: getattr(parsed, field.name) for field in msgspec.structs.fields(BrokerSettings)}
    return config.load(BrokerSettings, "nats", environ=os.environ, flags=flags)
