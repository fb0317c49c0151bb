"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM. The boundary has checked the admin key."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse

from services.gateway.adapter_calls import AdapterCalls
from services.gateway.cache_calls import CacheCalls
from services.gateway.gateway import Gateway
from services.gateway.openai_schema.adapters import LoadAdapterRequest, UnloadAdapterRequest
from services.gateway.openapi import describes
from services.gateway.pending import Slots
from shared.adapters import is_adapter_name, read_adapter
from shared.errors import AdapterRefused, InvalidRequest

AT_ONCE = 4
"""Limit on concurrent orders; each may read a large file."""


def adapters_router(gateway: Gateway) -> APIRouter:
    """Return the routes that load and unload LoRA adapters."""
    router = APIRouter(tags=["adapters"])
    calls = AdapterCalls(CacheCalls(gateway.bus), gateway.cell)
    slots = Slots(AT_ONCE)

    @router.post(
        "/v1/load_lora_adapter",
        response_model=None,
        openapi_extra=describes(LoadAdapterRequest, None),
        summary="Serve a LoRA adapter under a name of its own",
    )
    async def load_adapter(http: Request) -> Response:
        async with gateway.bodies.read(http) as body:
            request = await gateway.bodies.decode(body, LoadAdapterRequest)
        with slots.taken():
            _check_name(gateway, request.lora_name)
            folder = Path(request.lora_path)
            if not folder.is_absolute():
                raise InvalidRequest(
                    "lora_path must be absolute: workers have other working directories", param="lora_path"
                )
            try:
                files = await asyncio.to_thread(read_adapter, folder)
            except AdapterRefused as error:
                error.param = "lora_path"
                raise
            await calls.load(request.lora_name, files, replaces=request.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    @router.post(
        "/v1/unload_lora_adapter",
        response_model=None,
        openapi_extra=describes(UnloadAdapterRequest, None),
        summary="Accept no more requests for a LoRA adapter",
    )
    async def unload_adapter(http: Request) -> Response:
        async with gateway.bodies.read(http) as body:
            request = await gateway.bodies.decode(body, UnloadAdapterRequest)
        with slots.taken():
            await calls.unload(request.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")

    return router


def _check_name(gateway: Gateway, name: str) -> None:
    if not is_adapter_name(name):
        raise InvalidRequest(
            "lora_name must begin with a letter or digit, and have letters, digits and . _ : / - only",
            param="lora_name",
        )
    if name == gateway.facts.name:
        raise InvalidRequest(f"{name!r} is the base model", param="lora_name", code="adapter_exists")
