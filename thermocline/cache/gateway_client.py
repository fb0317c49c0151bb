"""Requests to a gateway, with its errors translated to one line."""

from __future__ import annotations

import argparse
import os
from typing import Any

import httpx

from services.gateway.admin_key import ADMIN_HEADER
from shared.arguments import Secret
from shared.config import ENVIRONMENT_PREFIX
from shared.errors import OperatorError, ThermoclineError, TransportError
from thermocline.client import connect
from thermocline.flags import add_url
from thermocline.supervisor import local_cell

TIMEOUT_S = 60.0


class GatewayRefused(ThermoclineError):
    """An error that the gateway answered with. ``retry_after_ms`` is 0 unless it asked to try again."""

    code = "gateway_refused"


def add_key(parser: argparse.ArgumentParser, flag: str, variable: str, what: str) -> None:
    """Add a flag for a key, whose default is an environment variable, which other users do not see."""
    name = ENVIRONMENT_PREFIX + variable
    parser.add_argument(flag, metavar="KEY", help=f"{what}; better set {name}, which no process list shows")
    parser.set_defaults(**{flag.removeprefix("--").replace("-", "_"): Secret(os.environ.get(name, ""))})


def add_gateway(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add the flags of a verb that may also go through a gateway, under its admin key."""
    add_url(parser, f"{verb} through this gateway, under its admin key", default=None)
    add_key(parser, "--admin-key", "ADMIN_KEY", "the gateway's --admin-key, where `thermocline up` made none")


def admin_headers(base_url: str, given: str) -> dict[str, str]:
    """Return headers with the given admin key, or else the one that a cell of this machine drew for this gateway."""
    key = given or local_cell.admin_key(base_url)
    return {ADMIN_HEADER: key} if key else {}


def client(
    base_url: str, headers: dict[str, str], *, timeout_s: float = TIMEOUT_S, **settings: Any
) -> httpx.AsyncClient:
    """Return a client of one gateway. Raises OperatorError for an invalid address or key."""
    try:
        url = httpx.URL(base_url)
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError("it must begin with http:// or https://")
        return connect(url, headers=headers, timeout=timeout_s, **settings)
    except (httpx.InvalidURL, UnicodeEncodeError, ValueError) as error:
        raise OperatorError(f"--url {base_url!r} or its key cannot be used: {error}") from error


def bearer(key: str) -> dict[str, str]:
    """Return headers with an API key, or none for an empty one."""
    return {"authorization": f"Bearer {key}"} if key else {}


async def get(http: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """Return the JSON answer to a GET. Raises as :func:`post` does."""
    return await _answer(http, "GET", path, None)


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON answer. Raises GatewayRefused, or TransportError when the gateway cannot be reached."""
    return await _answer(http, "POST", path, body)


async def delete(http: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """Return the JSON answer to a DELETE. Raises as :func:`post` does."""
    return await _answer(http, "DELETE", path, None)


async def _answer(http: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    try:
        response = await http.request(method, path, json=body)
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise TransportError(f"the gateway at {http.base_url} cannot be reached: {reason}") from error
    try:
        answer = response.json()
        if not isinstance(answer, dict):
            raise ValueError("no JSON object")
        if response.is_success:
            return answer
        message = str(answer["error"]["message"])
    except (ValueError, KeyError, TypeError) as error:
        raise TransportError(f"{http.base_url} answers {response.status_code} and is no gateway") from error
    wait = response.headers.get("retry-after", "")
    raise GatewayRefused(message, retry_after_ms=int(wait) * 1000 if wait.isdigit() else 0)
