"""The automatic admin key of a cell on loopback, with which its page works at once.

It is new at every start. The gateway gets it in its environment, commands on this machine from the cell's record, which
only this user may read, and the page in exchange for a one-time link (``services.gateway.page_links``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import httpx
import msgspec

from services.gateway.config import GatewayConfig
from services.gateway.keys import new_key
from services.gateway.openai_schema.cell import PageLink
from shared.loopback import is_loopback
from thermocline.supervisor.cell import Cell
from thermocline.supervisor.commands import ADMIN_KEY_VARIABLE, child_settings
from thermocline.supervisor.readiness import client


def with_page_key(cell: Cell, environ: Mapping[str, str]) -> Cell:
    """Return the cell with a key, if only this machine reaches its gateway and it has no tenants yet.

    Raises ConfigError for invalid settings of the gateway.
    """
    gateway = child_settings(GatewayConfig, "gateway", cell, environ)
    has_keys = gateway.admin_key or gateway.tenants or gateway.api_keys or gateway.api_keys_file
    if has_keys or not is_loopback(gateway.host):
        return cell
    return replace(cell, admin_key=new_key())


def admin_key_of(cell: Cell, environ: Mapping[str, str]) -> str:
    """Return the gateway's admin key, drawn for it or set by the operator; "" for none."""
    return cell.admin_key or child_settings(GatewayConfig, "gateway", cell, environ).admin_key


async def page_line(cell: Cell, environ: Mapping[str, str]) -> str:
    """Return the line with the page's address and how to open it. The gateway must already answer."""
    page = f"{cell.base_url}/ui"
    if cell.admin_key:
        try:
            async with client(cell.admin_key) as http:
                answer = await http.post(f"{cell.base_url}/v1/cell/page-link")
            link = msgspec.json.decode(answer.raise_for_status().content, type=PageLink)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            return f"Page: {page} (no link yet: {error}; `thermocline top --link` prints one)"
        return f"Page: {cell.base_url}{link.path}"
    if admin_key_of(cell, environ):
        return f"Page: {page} (asks for the admin key that you have set)"
    return f"Page: {page} (set {ADMIN_KEY_VARIABLE} to 16 characters or more before the start to open it)"
