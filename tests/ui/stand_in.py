"""A gateway as the page sees one: the real page beside an API that a test scripts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from services.gateway.connections import Connections
from services.gateway.http_server import bind, make_server
from services.gateway.ui.pages import ui_router
from tests.waiting import until

KEY = "an-admin-key-of-some-length"
NAMESPACES = ("9be407eaeef452a6f08e53092fb7ec2c", "c0ffee00c0ffee00c0ffee00c0ffee00")
NOW_MS = 1_763_000_000_000
PARTS = ("accept", "broker", "queue", "deferral", "prefetch_wait", "load", "restore", "compute", "deliver")
EVENTS_S = 0.1


def node(number: int, parent: int | None, depth: int, tokens: int, **changes: Any) -> dict[str, Any]:
    """A node as GET /v1/cache lists it."""
    return {
        "id": number, "parent": parent, "namespace": NAMESPACES[0], "depth": depth, "tokens": tokens, "hits": 0,
        "head": [number, 2, 3], "head_text": f"beginning of {number}", "device": {}, "host": {}, "disk": {},
        "hidden": {}, "pins": [], **changes,
    }  # fmt: skip


def a_tree(nodes: int, seed: int = 3) -> list[dict[str, Any]]:
    """A tree of so many nodes in two namespaces: few hot prefixes, many cold ends."""
    chance = random.Random(seed)
    made = [node(1, None, 0, 512, hits=400, device={"worker-0": 32}, host={"storage": 32}, disk={"storage": 8},
                 pins=["system"], head_text="You are the harbour office.")]  # fmt: skip
    for number in range(2, nodes + 1):
        namespace = NAMESPACES[number % 7 == 0]
        parents = [one for one in made[-40:] + made[:6] if one["namespace"] == namespace]
        parent = chance.choice(parents) if parents and chance.random() < 0.96 else None
        depth = parent["depth"] + parent["tokens"] if parent else 0
        tokens = 16 * chance.randrange(1, 40)
        held = chance.choice([("device",), ("device", "host"), ("host", "disk"), ("disk",)])
        places = {tier: {"worker-0" if tier == "device" else "storage": tokens // 16} for tier in held}
        hits = int(chance.paretovariate(0.8)) if chance.random() < 0.6 else 0
        made.append(
            node(number, parent["id"] if parent else None, depth, tokens, namespace=namespace, hits=hits, **places)
        )
    return made


def explanation(number: int, *, ttft_ms: float = 40.0, **changes: Any) -> dict[str, Any]:
    """A finished request of 1,000 tokens whose parts add up to its TTFT."""
    shares = (0.02, 0.08, 0.1, 0.0, 0.05, 0.2, 0.0, 0.5, 0.05)
    start, parts = 0.0, []
    for name, share in zip(PARTS, shares, strict=True):
        parts.append({"name": name, "start_ms": start, "ms": ttft_ms * share})
        start += ttft_ms * share
    spans = (
        (0, 512, "device", None), (512, 768, "host", None), (768, 896, "disk", None),
        (896, 999, "computed", "never_stored"), (999, 1000, "computed", "last_token"),
    )  # fmt: skip
    return {
        "object": "request.explanation", "id": f"http-{number}", "request_id": f"request-{number}",
        "namespace": NAMESPACES[0], "endpoint": "/v1/chat/completions", "model": "test", "state": "finished",
        "created_ms": NOW_MS + 1000 * number, "finish_reason": "stop", "error_code": None, "prompt_tokens": 1000,
        "completion_tokens": 20, "attempts": 1, "workers": ["worker-0"], "ttft_ms": ttft_ms, "total_ms": 2 * ttft_ms,
        "parts": parts, "importance": None, "divergence": None,
        "prompt": [{"start": a, "end": b, "source": s, "reason": r, "detail": None} for a, b, s, r in spans],
        **changes,
    }  # fmt: skip


def divergence(**changes: Any) -> dict[str, Any]:
    """A prompt whose system message has another time, and a character that could be markup."""
    return {
        "kind": "diverged", "token": 37, "part": "message", "message": 0, "role": "system",
        "before": "the harbour <b>office</b>. It is 12:0", "prompt": "5 now. Answer briefly.",
        "cached": "4 now. Answer briefly.", "cause": "date_or_time", "lost_tokens": 812, "lost_ms": 93.1, **changes,
    }  # fmt: skip


def costly(**changes: Any) -> dict[str, Any]:
    """A divergence point of the cell."""
    told = {name: divergence()[name] for name in ("token", "before", "prompt", "cached", "cause")}
    return {
        **told, "namespace": NAMESPACES[0], "requests": 41, "lost_tokens": 33_292, "error_tokens": 0,
        "lost_ms": 3_817.0, "request_id": "request-5", "last_ms": NOW_MS, **changes,
    }  # fmt: skip


WAYS = {
    ("computed", "device"): 900, ("device", "host"): 640, ("host", "device"): 2_600, ("host", "disk"): 320,
    ("disk", "host"): 130, ("remote", "host"): 64, ("lent", "host"): 0,
}  # fmt: skip
"""Tokens that go each way in a second of the scripted cell."""


def flows(second: float) -> list[dict[str, Any]]:
    """What has gone each way after so many seconds."""
    return [
        {"source": source, "target": target, "tokens": round(second * tokens)}
        for (source, target), tokens in WAYS.items()
    ]


def a_cell(**changes: Any) -> dict[str, Any]:
    """A CellReport."""
    return {
        "object": "cell", "age_ms": 10.0, "scheduler_id": "scheduler-0", "epoch": 3, "seq": 99,
        "model": "0123456789abcdef", "page_size": 16, "queued": 2, "running": 5,
        "max_queued": 1000, "max_context": 8192,
        "workers": [
            {"worker_id": "worker-0", "incarnation": "one", "running": 4, "waiting": 1, "draining": False},
            {"worker_id": "worker-1", "incarnation": "one", "running": 1, "waiting": 0, "draining": True},
        ],
        "storages": ["storage"], "storage_incarnations": {"storage": "one"},
        "pools": [
            {"owner": "worker-0", "tier": "device", "total": 682, "cached": 400, "leased": 80, "free": 202, "form": ""},
            {"owner": "worker-1", "tier": "device", "total": 682, "cached": 100, "leased": 10, "free": 572, "form": ""},
            {"owner": "storage", "tier": "host", "total": 2048, "cached": 1800, "leased": 12, "free": 236, "form": ""},
        ],
        "counters": {"hit_tokens_device": 54_400, "hit_tokens_host": 21_000, "hit_tokens_disk": 3_840,
                     "evicted_pages_device": 12},
        "nodes": 300, "pins": 1, "pinned_pages": 32, "cache_leases": 1, "leased_pages": 128,
        "chunks": 90, "hidden_chunks": 0, "sparse_chunks": 0, "fetches": 1,
        "saves": 2, "deferred": 0, "in_queue_nodes": 0, "in_flight_nodes": 1, "restorations": [],
        "models": ["harbour-8b"], "chunk_tokens": 64, "flows": flows(0), "degraded": [],
        "savings": {"tokens": 79_240, "computed_tokens": 8_810, "prefill_seconds": 46.5, "load_seconds": 1.25},
        **changes,
    }  # fmt: skip


DISK = {"disk_chunks": 90, "disk_bytes": 3_000_000, "disk_quota_bytes": 10**9, "chunks_quarantined": 1}


@dataclass
class StandIn:
    """What the API says; ``orders`` are the bodies of what changes the cache, in order."""

    url: str = ""
    cell: dict[str, Any] = field(default_factory=a_cell)
    scheduler_error: str = ""
    error_code: str = "scheduler_away"
    storages: dict[str, dict[str, int] | None] = field(default_factory=lambda: {"storage": dict(DISK)})
    admin_is_off: bool = False
    is_full: bool = False
    key: str = KEY
    codes: list[str] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=lambda: a_tree(300))
    requests: list[dict[str, Any]] = field(
        default_factory=lambda: [explanation(n, ttft_ms=20.0 + n) for n in range(40)]
    )
    divergences: list[dict[str, Any]] = field(default_factory=list)
    pins: list[dict[str, Any]] = field(default_factory=list)
    orders: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    words: tuple[str, ...] = ("The ", "harbour ", "opens ", "at <b>six</b>.")
    thoughts: tuple[str, ...] = ()
    finish_reason: str = "stop"
    streams: int = 0  # Open streams of the cell's status.
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def refusal(self, http: Request) -> Response | None:
        """Why a call may not be made, None when it may."""
        if self.admin_is_off:
            return _error(403, "the cache's administration is off: this gateway has no --admin-key")
        if http.headers.get("x-admin-key") != self.key:
            return _error(401, "the admin key is required")
        if self.is_full:
            return _error(429, "the server has as many connections as it takes")
        return None

    async def events(self) -> AsyncIterator[str]:
        """The cell's status, much more often than a gateway sends it."""
        self.streams += 1
        try:
            while not self.stopping.is_set():
                error = {"message": self.scheduler_error, "code": self.error_code}
                said = {"error": error} if self.scheduler_error else self.cell
                yield f"data: {json.dumps(said)}\n\n"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EVENTS_S):
                        await self.stopping.wait()
        finally:
            self.streams -= 1

    async def answer(self) -> AsyncIterator[str]:
        """A streamed chat answer with its explanation in the last chunk."""
        for thought in self.thoughts:
            yield f"data: {json.dumps({'choices': [{'delta': {'reasoning_content': thought}}]})}\n\n"
        for word in self.words:
            yield f"data: {json.dumps({'choices': [{'delta': {'content': word}}]})}\n\n"
        told = explanation(99, finish_reason=self.finish_reason)
        yield f"data: {json.dumps({'choices': [], 'explanation': told})}\n\ndata: [DONE]\n\n"


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "any", "code": "any"}}, status)


def build(stand_in: StandIn) -> FastAPI:
    """The page and the scripted API."""
    app = FastAPI()
    app.include_router(ui_router())

    @app.post("/ui/key", response_model=None)
    async def key(http: Request) -> Response:
        code = (await http.json())["code"]
        if code not in stand_in.codes:
            return _error(404, "this link was used before, or is too old")
        stand_in.codes.remove(code)
        return JSONResponse({"admin_key": stand_in.key})

    @app.get("/v1/cell", response_model=None)
    async def cell(http: Request) -> Response:
        if stand_in.scheduler_error:
            return stand_in.refusal(http) or _error(503, stand_in.scheduler_error)
        return stand_in.refusal(http) or JSONResponse(stand_in.cell)

    @app.get("/v1/cell/events", response_model=None)
    async def cell_events(http: Request) -> Response:
        return stand_in.refusal(http) or StreamingResponse(stand_in.events(), media_type="text/event-stream")

    @app.get("/v1/requests", response_model=None)
    async def requests(http: Request, limit: int = 50, after: str = "") -> Response:
        refused = stand_in.refusal(http) or (
            _error(400, "limit must be a number from 1 to 100") if limit > 100 else None
        )
        ids = [one["request_id"] for one in stand_in.requests]
        older = stand_in.requests[ids.index(after) + 1 :] if after in ids else stand_in.requests
        return refused or JSONResponse({"object": "list", "data": older[:limit], "has_more": len(older) > limit})

    @app.get("/v1/requests/{name}/explain", response_model=None)
    async def explain(name: str, http: Request) -> Response:
        found = next((one for one in stand_in.requests if name in (one["id"], one["request_id"])), None)
        return stand_in.refusal(http) or (JSONResponse(found) if found else _error(404, "it is forgotten"))

    @app.get("/v1/cache", response_model=None)
    async def cache(http: Request, limit: int = 256, after: int = 0) -> Response:
        # Numbers are places + 1, so that a page is a slice.
        page = stand_in.nodes[after : after + limit]
        more = after + limit if after + limit < len(stand_in.nodes) else None
        return stand_in.refusal(http) or JSONResponse({"data": page, "has_more": more is not None, "next_after": more})

    @app.get("/v1/cache/stats", response_model=None)
    async def stats(http: Request) -> Response:
        return stand_in.refusal(http) or JSONResponse({"storages": stand_in.storages})

    @app.get("/v1/cache/divergences", response_model=None)
    async def divergences(http: Request) -> Response:
        found = {"object": "list", "data": stand_in.divergences, "since_ms": NOW_MS}
        return stand_in.refusal(http) or JSONResponse(found)

    @app.get("/v1/cache/pins", response_model=None)
    async def pins(http: Request) -> Response:
        return stand_in.refusal(http) or JSONResponse({"data": stand_in.pins})

    @app.post("/v1/cache/{what}", response_model=None)
    async def order(what: str, http: Request) -> Response:
        refused = stand_in.refusal(http)
        if refused:
            return refused
        body = await http.json()
        stand_in.orders.append((what, body))
        if what == "flush":
            return JSONResponse({"tiers": body["tiers"], "device_pages": 3, "host_pages": 2, "disk_chunks": 0})
        if what == "prewarm":
            warmed = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 50}}
            return JSONResponse({"data": [warmed for _ in body["prompts"]], "failed": 0})
        pin = {
            "name": body.get("name", "pin-1"),
            "tokens": 64,
            "held_tokens": 48,
            "pages": 3,
            "expires_at": 2e9,
            "refusal": "",
        }
        stand_in.pins.append(pin)
        return JSONResponse(pin)

    @app.get("/v1/cache/leases", response_model=None)
    async def leases(http: Request) -> Response:
        lease = {"tenant": "acme", "key": "s", "tokens": 2048, "ttl_s": 300, "expires_at": 1.9e9}
        return stand_in.refusal(http) or JSONResponse({"data": [lease]})

    @app.delete("/v1/cache/pins/{name}", response_model=None)
    async def unpin(name: str, http: Request) -> Response:
        stand_in.orders.append(("unpin", {"name": name}))
        stand_in.pins = [pin for pin in stand_in.pins if pin["name"] != name]
        return stand_in.refusal(http) or JSONResponse({"name": name})

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(http: Request) -> Response:
        stand_in.orders.append(("chat", await http.json()))
        return StreamingResponse(stand_in.answer(), media_type="text/event-stream")

    return app


@contextlib.asynccontextmanager
async def serving(stand_in: StandIn, port: int = 0) -> AsyncIterator[StandIn]:
    """A server on loopback; its address is in ``url``."""
    sock = bind("127.0.0.1", port)
    stand_in.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    stand_in.stopping = asyncio.Event()
    server = make_server(build(stand_in), Connections(1024, 10.0))
    task = asyncio.create_task(server.serve(sockets=[sock]))
    await until(lambda: server.started)
    try:
        yield stand_in
    finally:
        stand_in.stopping.set()
        server.should_exit = True
        await task
        sock.close()
