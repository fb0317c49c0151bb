"""The admin key that a cell on loopback has by itself, so that its page works at once.

It is new at every start. The gateway gets it in its environment, commands on this machine in the cell's record, which
only this user may read, and the page for the code of a link that works once (``services.gateway.page_links``).
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
from thermocline.supervisor.child_settings import child_settings
from thermocline.supervisor.commands import ADMIN_KEY_VARIABLE
from thermocline.supervisor.readiness import client


def with_page_key(cell: Cell, environ: Mapping[str, str]) -> Cell:
    """Return the cell with a key, if only this machine reaches its gateway and it has no tenants yet.

    Raises ConfigError where the gateway would.
    """
    gateway = child_settings(GatewayConfig, "gateway", cell, environ)
    has_keys = gateway.admin_key or gateway.tenants or gateway.api_keys or gateway.api_keys_file
    if has_keys or not is_loopback(gateway.host):
        return cell
    return replace(cell, admin_key=new_key())


def admin_key_of(cell: Cell, environ: Mapping[str, str]) -> str:
    """Return the key that its gateway has, drawn for it or set by the operator; "" for none."""
    return cell.admin_key or child_settings(GatewayConfig, "gateway", cell, environ).admin_key


async def page_line(cell: Cell, environ: Mapping[str, str]) -> str:
    """Return the line that says where the page is and how it opens. The gateway must answer already."""
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
