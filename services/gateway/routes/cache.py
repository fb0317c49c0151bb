"""The administration of the cache, below /v1/cache, and other servers' names for a flush.

The boundary has checked the admin key before.
"""

from __future__ import annotations

from typing import TypeVar

from fastapi import APIRouter, Request, Response

from services.gateway.accounts import OPEN, Account
from services.gateway.cache_calls import CacheCalls
from services.gateway.gateway import Gateway
from services.gateway.json_response import json_response
from services.gateway.openai_schema.cache import (
    MAX_LISTED,
    CacheNodes,
    CacheStats,
    FlushReport,
    FlushRequest,
    LeaseList,
    Pin,
    PinDeleted,
    PinList,
    PinRequest,
    PrewarmReport,
    PrewarmRequest,
    PromptSource,
    VerifyReport,
    VerifyRequest,
)
from services.gateway.openai_schema.explanation import CostlyDivergences
from services.gateway.openapi import describes
from services.gateway.pending import Slots
from services.gateway.prewarming import Warming, prewarm
from services.gateway.prompt_source import tokenize_source
from services.gateway.query import whole_number
from services.gateway.routes.cache_resets import add_cache_resets
from services.gateway.scrub_walk import scrub_next
from services.gateway.tenants import Tenant
from services.gateway.views.cache_view import lease_view, node_view, pin_view, stats_view
from services.gateway.views.divergence import divergences_view
from shared.errors import InvalidRequest, NotFound
from shared.ids import is_valid_name, new_id
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.cell_events import PinPrefix

AT_ONCE = 8
"""Limit on operators' concurrent calls; they take none of the API's slots."""

LISTED = 256
DIVERGENCES = 10
MOST_DIVERGENCES = 64

_ONE_NAMESPACE = {
    "namespace": "only this namespace (32 hex digits)",
    "cache_salt": "only the namespace of this salt",
    "tenant": "only the namespace of this tenant, and of this salt of its requests",
}

T = TypeVar("T")


def cache_router(gateway: Gateway) -> APIRouter:
    """Return the routes that list, prewarm, pin, flush and verify the cache."""
    router = APIRouter(tags=["cache"])
    calls = CacheCalls(gateway.bus)
    slots = Slots(AT_ONCE)

    @router.get(
        "/v1/cache",
        response_model=None,
        openapi_extra=describes(
            None,
            CacheNodes,
            query={
                **_ONE_NAMESPACE,
                "limit": f"nodes to list, 1 to {MAX_LISTED}, {LISTED} without it",
                "after": "next_after of the page before",
            },
        ),
        summary="Nodes of the radix tree, and where their pages are",
    )
    async def list_nodes(http: Request) -> Response:
        with slots.taken():
            namespace = _queried_namespace(gateway, http)
            limit = whole_number(http, "limit", LISTED, 1, MAX_LISTED)
            after = whole_number(http, "after", 0, 0, 2**53)
            page = await calls.page(namespace, after=after, limit=limit)
        nodes = [node_view(node, gateway.tokenizer.decode(unpack_int32(node.head))) for node in page.nodes]
        more = page.next_after or None
        return json_response(CacheNodes(data=nodes, has_more=more is not None, next_after=more))

    @router.get(
        "/v1/cache/divergences",
        response_model=None,
        openapi_extra=describes(
            None,
            CostlyDivergences,
            query={"limit": f"points to list, 1 to {MOST_DIVERGENCES}, {DIVERGENCES} without it"},
        ),
        summary="Where prompts leave the cache, and what that costs",
    )
    async def divergences(http: Request) -> Response:
        with slots.taken():
            found = await calls.divergences(whole_number(http, "limit", DIVERGENCES, 1, MOST_DIVERGENCES))
        return json_response(divergences_view(found, gateway.tokenizer.decode))

    @router.get(
        "/v1/cache/stats",
        response_model=None,
        openapi_extra=describes(None, CacheStats),
        summary="Pools, hits by tier, and the storages' counters",
    )
    async def stats() -> Response:
        with slots.taken():
            status = await calls.status()
            return json_response(stats_view(status, await calls.inventories(status.storages)))

    _add_keeping(router, gateway, calls, slots)
    add_cache_resets(router, calls, slots)

    @router.post(
        "/v1/cache/prewarm",
        response_model=None,
        openapi_extra=describes(PrewarmRequest, PrewarmReport),
        summary="Bring prompts into the cache",
    )
    async def warm(http: Request) -> Response:
        with slots.taken():
            request = await _body(gateway, http, PrewarmRequest)
            prompts = []
            for place, given in enumerate(request.prompts):
                source = PromptSource(prompt=given) if isinstance(given, str) else given
                tenant = _tenant(gateway, source.tenant)
                model = gateway.model(source.model)
                namespace = gateway.namespace(tenant, source.cache_salt, model.adapter)
                tokens = await tokenize_source(gateway, source, namespace, path=f"prompts[{place}].")
                prompts.append(Warming(tokens, model, source.cache_salt, tenant))
            # Without a scheduler, requests would only wait for their timeouts.
            await calls.status()
            data = await prewarm(gateway, http.receive, prompts)
        failed = sum(warmed.prompt_tokens_details is None for warmed in data)
        return json_response(PrewarmReport(data=data, failed=failed))

    @router.post(
        "/v1/cache/flush",
        response_model=None,
        openapi_extra=describes(FlushRequest, FlushReport),
        summary="Drop unused KV",
    )
    async def flush(http: Request) -> Response:
        with slots.taken():
            request = await _body(gateway, http, FlushRequest, is_optional=True)
            return json_response(await _flush(gateway, calls, request))

    @router.post(
        "/v1/cache/verify",
        response_model=None,
        openapi_extra=describes(VerifyRequest, VerifyReport),
        summary="Read chunks of the disks and check them",
    )
    async def verify(http: Request) -> Response:
        with slots.taken():
            return json_response(await scrub_next(calls, await _body(gateway, http, VerifyRequest, is_optional=True)))

    return router


def _add_keeping(router: APIRouter, gateway: Gateway, calls: CacheCalls, slots: Slots) -> None:
    """Add the routes of operators' pins, and of leases that requests asked for."""

    @router.post(
        "/v1/cache/pins",
        response_model=None,
        openapi_extra=describes(PinRequest, Pin),
        summary="Keep a prefix for a time",
    )
    async def pin(http: Request) -> Response:
        with slots.taken():
            request = await _body(gateway, http, PinRequest)
            adapter = gateway.model(request.model).adapter
            namespace = gateway.namespace(_tenant(gateway, request.tenant), request.cache_salt, adapter)
            tokens = await tokenize_source(gateway, request, namespace)
            order = PinPrefix(
                pin_id=request.name or new_id("pin"),
                namespace=namespace,
                tokens=pack_int32(tokens),
                ttl_ms=max(1, round(request.ttl_s * 1000)),
            )
            return json_response(pin_view(await calls.pin(order)))

    @router.get(
        "/v1/cache/pins", response_model=None, openapi_extra=describes(None, PinList), summary="All pins of the cell"
    )
    async def list_pins() -> Response:
        with slots.taken():
            return json_response(PinList(data=[pin_view(pin) for pin in await calls.pins()]))

    @router.get(
        "/v1/cache/leases",
        response_model=None,
        openapi_extra=describes(
            None,
            LeaseList,
            query={
                **_ONE_NAMESPACE,
                "limit": f"leases to list, 1 to {MAX_LISTED}, {LISTED} without it",
            },
        ),
        summary="Prefixes that requests asked to keep",
    )
    async def list_leases(http: Request) -> Response:
        with slots.taken():
            namespace = _queried_namespace(gateway, http)
            limit = whole_number(http, "limit", LISTED, 1, MAX_LISTED)
            leases = await calls.leases(namespace, limit=limit)
            return json_response(LeaseList(data=[lease_view(each) for each in leases]))

    @router.delete(
        "/v1/cache/pins/{name}",
        response_model=None,
        openapi_extra=describes(None, PinDeleted),
        summary="Release a pin",
    )
    async def unpin(name: str) -> Response:
        if not is_valid_name(name):
            raise NotFound(f"there is no pin {name[:64]!r}", code="pin_not_found")
        with slots.taken():
            await calls.unpin(name)
        return json_response(PinDeleted(name=name))


async def _body(gateway: Gateway, http: Request, schema: type[T], *, is_optional: bool = False) -> T:
    async with gateway.bodies.read(http) as body:
        return await gateway.bodies.decode(body or (b"{}" if is_optional else b""), schema)


async def _flush(gateway: Gateway, calls: CacheCalls, request: FlushRequest) -> FlushReport:
    namespace = _namespace(gateway, request.namespace, request.cache_salt, request.tenant)
    if request.responses and request.namespace:
        raise InvalidRequest("a namespace does not name the tenant whose responses to erase", param="responses")
    flushed = await calls.flush(request.tiers, namespace)
    erased = 0
    if request.responses:
        erased = await gateway.entries.erase_all(_account(gateway, request.tenant), request.cache_salt)
    return FlushReport(
        tiers=list(request.tiers),
        device_pages=flushed.device_pages,
        host_pages=flushed.host_pages,
        disk_chunks=flushed.disk_chunks,
        responses=erased,
    )


def _tenant(gateway: Gateway, name: str | None) -> Tenant:
    """Return the tenant of this name; without a name, the open tenant. Raises NotFound."""
    account = _account(gateway, name)
    return account.tenant if account is not None else OPEN


def _account(gateway: Gateway, name: str | None) -> Account | None:
    """Return the account of a tenant, or None without a name. Raises NotFound."""
    if name is None:
        return None
    account = gateway.callers.account(name)
    if account is None:
        raise NotFound(f"there is no tenant {name[:64]!r} in --tenants", param="tenant", code="tenant_not_found")
    return account


def _queried_namespace(gateway: Gateway, http: Request) -> str:
    return _namespace(gateway, *(http.query_params.get(name) for name in _ONE_NAMESPACE))


def _namespace(gateway: Gateway, namespace: str | None, salt: str | None, tenant: str | None) -> str:
    """Return the namespace of a query, "" for all. Raises InvalidRequest, NotFound."""
    if namespace and (salt or tenant):
        raise InvalidRequest("give either namespace or cache_salt and tenant", param="cache_salt" if salt else "tenant")
    if salt or tenant:
        return gateway.namespace(_tenant(gateway, tenant), salt)
    if namespace and (len(namespace) != 32 or set(namespace) - set("0123456789abcdef")):
        raise InvalidRequest("a namespace is 32 hex digits", param="namespace")
    return namespace or ""
