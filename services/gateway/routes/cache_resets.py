"""Names of other servers for dropping cached KV, which load generators call between runs: vLLM's and SGLang's."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from services.gateway.cache_calls import CacheCalls
from services.gateway.json_response import json_response
from services.gateway.openai_schema.cache import FlushReport
from services.gateway.openapi import describes
from services.gateway.pending import Slots
from services.gateway.query import check_names, flag
from shared.errors import InvalidRequest

MEMORY = ("device", "host")
"""What a restart of the cell would empty, so that a run after it begins as cold as one after a restart."""

EXTERNAL = ("disk", "remote")


def add_cache_resets(router: APIRouter, calls: CacheCalls, slots: Slots) -> None:
    """Add both routes to those of the administration. Bodies are not read: neither server has one."""

    async def flushed(tiers: Sequence[str]) -> Response:
        with slots.taken():
            found = await calls.flush(tiers)
        return json_response(
            FlushReport(
                tiers=list(tiers),
                device_pages=found.device_pages,
                host_pages=found.host_pages,
                disk_chunks=found.disk_chunks,
            )
        )

    @router.post(
        "/reset_prefix_cache",
        response_model=None,
        openapi_extra=describes(
            None,
            FlushReport,
            query={
                "reset_external": "true: disk and object store, too",
                "reset_running_requests": "only false: KV in use stays",
            },
        ),
        summary="Drop unused KV, by vLLM's name",
    )
    async def reset_prefix_cache(http: Request) -> Response:
        check_names(http, "reset_external", "reset_running_requests")
        if flag(http, "reset_running_requests"):
            raise InvalidRequest(
                "running requests keep their KV; wait for them, or cancel them by disconnecting",
                param="reset_running_requests",
                code="unsupported_parameter",
            )
        return await flushed((*MEMORY, *EXTERNAL) if flag(http, "reset_external") else MEMORY)

    @router.post(
        "/flush_cache",
        response_model=None,
        openapi_extra=describes(None, FlushReport, query={"timeout": "not used: what is not in use is dropped now"}),
        summary="Drop unused KV, by SGLang's name",
    )
    async def flush_cache(http: Request) -> Response:
        check_names(http, "timeout")
        return await flushed(MEMORY)
