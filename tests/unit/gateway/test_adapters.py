"""LoRA adapters at the gateway: asked for by name, listed, loaded and unloaded by operators."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from services.gateway.adapter_calls import AdapterCalls, AdapterConflict
from services.gateway.adapter_start import StartAdapters, start_adapters
from services.gateway.cache_calls import CacheCalls
from services.gateway.cell import CellView
from shared import subjects
from shared.adapters import AdapterFiles, read_adapter
from shared.bus.protocol import Bus, StreamLimits
from shared.codec import decode_input, encode
from shared.errors import AdapterRefused, ConfigError, InvalidRequest, NotFound, Unavailable
from shared.ids import namespace_digest
from shared.messages.cell_events import LoadAdapter, UnloadAdapter
from shared.messages.gateway_notices import RequestFailed
from shared.messages.status import AdapterReplacement, AdapterStatus, CellStatus
from tests.memory_bus import MemoryBroker
from tests.unit.gateway.running_gateway import FACTS, Harness, running_gateway, says
from tests.unit.gateway.scripted_cell import cell_status, idle_workers
from tests.waiting import until

DIGEST = "d" * 32
TUNED = AdapterStatus(name="tuned", digest=DIGEST, path="/adapters/tuned", workers=("worker-0",))
LOADING = AdapterStatus(name="loading", digest="e" * 32, path="/adapters/loading")


def make_adapter(folder: Path, *, alpha: int = 8) -> Path:
    """An adapter of one module, which no model has."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": alpha, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {f"base_model.model.a.q_proj.lora_{part}.weight": np.ones((2, 2), np.float32) for part in "AB"}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


async def hear(harness: Harness, *adapters: AdapterStatus) -> None:
    await harness.cell.announce(adapters=adapters)
    await until(lambda: harness.gateway.cell.adapters() == adapters)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_requests_for_an_adapter_carry_it(path: str) -> None:
    """Every API takes its name, works in its namespace, and answers under its name."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "sea"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "sea"}]},
        "/v1/messages": {"messages": [{"role": "user", "content": "sea"}], "max_tokens": 4},
        "/v1/responses": {"input": "sea"},
    }
    async with running_gateway(says("deep")) as harness:
        await hear(harness, TUNED)
        tuned = await harness.client.post(path, json=bodies[path] | {"model": "tuned"})
        base = await harness.client.post(path, json=bodies[path] | {"model": FACTS.name})

        adapted, plain = harness.cell.submitted
        assert (tuned.json()["model"], base.json()["model"]) == ("tuned", FACTS.name)
        assert (adapted.adapter, plain.adapter) == (DIGEST, "")
        assert adapted.namespace == namespace_digest(FACTS.fingerprint, adapter=DIGEST)
        assert plain.namespace == namespace_digest(FACTS.fingerprint)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "sea"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "sea"}]}),
        ("/tokenize", {"prompt": "sea"}),
        ("/detokenize", {"tokens": [9]}),
    ],
)
async def test_another_model_is_not_found(path: str, body: dict[str, Any]) -> None:
    """With the code that OpenAI's clients know, and the names that are served; no model at all is fine."""
    async with running_gateway(says("deep")) as harness:
        await hear(harness, TUNED)
        assert (await harness.client.post(path, json=body)).status_code == httpx.codes.OK
        assert (await harness.client.post(path, json=body | {"model": "tuned"})).status_code == httpx.codes.OK

        answer = await harness.client.post(path, json=body | {"model": "gpt-4"})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert f"serves {FACTS.name!r}, 'tuned'." in error["message"]


async def test_models_are_listed_with_their_parent() -> None:
    """An adapter that no worker has yet is not listed, and known by its name."""
    async with running_gateway() as harness:
        await hear(harness, TUNED, LOADING)
        listed = (await harness.client.get("/v1/models")).json()["data"]
        anthropic = await harness.client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        one = (await harness.client.get("/v1/models/loading")).json()

    assert [(card["id"], card["parent"], card["root"]) for card in listed] == [
        (FACTS.name, None, FACTS.name),
        ("tuned", FACTS.name, "/adapters/tuned"),
    ]
    assert [card["id"] for card in anthropic.json()["data"]] == [FACTS.name, "tuned"]
    assert (one["id"], one["parent"]) == ("loading", FACTS.name)


async def test_an_adapter_that_went_meanwhile_is_not_found() -> None:
    """The scheduler refuses what the gateway did not know to be gone."""
    async with running_gateway() as harness:
        await hear(harness, TUNED)
        body = {"model": "tuned", "prompt": "sea"}
        asking = asyncio.create_task(harness.client.post("/v1/completions", json=body))
        await harness.cell.until(lambda: len(harness.cell.submitted) == 1)
        asked = harness.cell.submitted[0]
        await harness.cell.notify(
            asked.gateway_id, RequestFailed(request_id=asked.request_id, code="model_not_found", message="gone")
        )
        answer = await asking

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


async def test_prefixes_of_adapters_are_read_whole() -> None:
    """Who asks otherwise is refused; a default of the deployment is not applied."""
    async with running_gateway(says("deep"), importance="on", importance_ratio=0.5) as harness:
        await hear(harness, TUNED)
        body = {"model": "tuned", "prompt": "sea"}
        fine = await harness.client.post("/v1/completions", json=body)
        refused = await harness.client.post("/v1/completions", json=body | {"cache": {"fidelity": "importance"}})

        assert fine.status_code == httpx.codes.OK
        assert harness.cell.submitted[0].cache.importance is None
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache.fidelity")


class ScriptedScheduler:
    """Folds orders at once. ``fault`` is what every worker says of an adapter; ``is_slow``: they say nothing."""

    def __init__(self, bus: Bus, *, workers: int = 1) -> None:
        self.bus, self.workers, self.fault, self.is_slow, self.seq = bus, workers, "", False, 0
        self.is_full = False  # The fault is one that passes.
        self.adapters: dict[str, AdapterStatus] = {}
        self.orders: list[LoadAdapter | UnloadAdapter] = []

    def status(self) -> CellStatus:
        workers, adapters = idle_workers(self.workers), tuple(self.adapters.values())
        return cell_status(seq=self.seq, workers=workers, adapters=adapters)

    async def follow(self) -> None:
        async for message in self.bus.follow(subjects.INPUTS_STREAM):
            order = decode_input(message.data)
            if isinstance(order, LoadAdapter):
                self.orders.append(order)
                self.load(order)
            elif isinstance(order, UnloadAdapter):
                self.orders.append(order)
                self.unload(order)
            self.seq = message.seq

    def load(self, order: LoadAdapter) -> None:
        now = self.adapters.get(order.name)
        if (now.digest if now is not None else "") not in (order.expects, order.digest):
            return
        workers = () if self.fault or self.is_slow else tuple(f"worker-{n}" for n in range(self.workers))
        told = dict.fromkeys(("worker-0",) if self.fault else (), self.fault)
        faults, waits = ({}, told) if self.is_full else (told, {})
        if now is not None and now.digest != order.digest and not workers:
            coming = AdapterReplacement(digest=order.digest, faults=faults, room_waits=waits)
            self.adapters[order.name] = msgspec.structs.replace(now, replacement=coming)
            return
        self.adapters[order.name] = AdapterStatus(
            name=order.name, digest=order.digest, path=order.path, workers=workers, faults=faults, room_waits=waits
        )

    def unload(self, order: UnloadAdapter) -> None:
        now = self.adapters.get(order.name)
        if now is None or order.digest in ("", now.digest):
            self.adapters.pop(order.name, None)
        elif now.replacement is not None and now.replacement.digest == order.digest:
            self.adapters[order.name] = msgspec.structs.replace(now, replacement=None)

    async def answer(self, data: bytes) -> bytes:
        return encode(self.status())


@contextlib.asynccontextmanager
async def scripted(
    *, workers: int = 1, load_s: float = 20.0, hears: bool = True, hear_s: float = 20.0
) -> AsyncIterator[tuple[ScriptedScheduler, AdapterCalls]]:
    """A scheduler, and calls of a gateway that hears of every status where it ``hears``."""
    bus = MemoryBroker().connect("test")
    await bus.ensure_streams(StreamLimits())
    scheduler, view = ScriptedScheduler(bus, workers=workers), CellView("")

    async def answer(data: bytes) -> bytes:
        if hears:
            view.hear(scheduler.status(), 0.0)
        return await scheduler.answer(data)

    serving = await bus.serve(subjects.rpc("scheduler", "status"), answer)
    following = asyncio.create_task(scheduler.follow())
    try:
        yield scheduler, AdapterCalls(CacheCalls(bus), view, load_s=load_s, room_s=0.1, hear_s=hear_s)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await serving.close()
        await bus.close()


@pytest.fixture
def files(tmp_path: Path) -> AdapterFiles:
    return read_adapter(make_adapter(tmp_path / "adapter"))


async def test_loading_waits_for_every_worker(files: AdapterFiles) -> None:
    """The order names directory and digest; the call returns once all workers have it."""
    async with scripted(workers=2) as (scheduler, calls):
        await calls.load("tuned", files, replaces=False)

        order = LoadAdapter(name="tuned", path=str(files.directory), digest=files.digest, expects="")
        assert scheduler.orders == [order]
        assert calls.view.adapter("tuned") is not None


async def test_a_taken_name_is_refused_unless_it_is_to_be_replaced(files: AdapterFiles, tmp_path: Path) -> None:
    """As vLLM has it."""
    other = read_adapter(make_adapter(tmp_path / "other", alpha=1))
    async with scripted() as (scheduler, calls):
        await calls.load("tuned", files, replaces=False)
        with pytest.raises(InvalidRequest, match="load_inplace") as refusal:
            await calls.load("tuned", other, replaces=False)
        assert refusal.value.code == "adapter_exists"

        await calls.load("tuned", other, replaces=True)

        assert scheduler.adapters["tuned"].digest == other.digest


async def test_what_a_worker_cannot_load_is_taken_back(files: AdapterFiles, tmp_path: Path) -> None:
    """The reason is told, and the name means what it meant before: nothing is loaded from its directory again."""
    other = read_adapter(make_adapter(tmp_path / "other", alpha=1))
    async with scripted() as (scheduler, calls):
        scheduler.fault = "no memory"
        with pytest.raises(AdapterRefused, match="worker-0 cannot load it: no memory"):
            await calls.load("tuned", files, replaces=False)
        assert scheduler.adapters == {}
        scheduler.fault = ""
        await calls.load("tuned", files, replaces=False)
        scheduler.fault = "no memory"

        with pytest.raises(AdapterRefused):
            await calls.load("tuned", other, replaces=True)

        assert scheduler.orders[-1] == UnloadAdapter(name="tuned", digest=other.digest)
        assert (scheduler.adapters["tuned"].digest, scheduler.adapters["tuned"].replacement) == (files.digest, None)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"workers": 0}, "no worker has joined"),
        ({"load_s": 0.05}, "within 0.05 s"),
        ({"hears": False, "hear_s": 0.2}, "is silent"),
    ],
)
async def test_waits_are_bounded(files: AdapterFiles, given: dict[str, Any], error: str) -> None:
    """Without workers, with workers that are slow, and with a scheduler that this gateway does not hear."""
    async with scripted(**given) as (scheduler, calls):
        scheduler.is_slow = "load_s" in given

        with pytest.raises(Unavailable, match=error):
            await calls.load("tuned", files, replaces=False)


async def test_an_adapter_that_a_worker_could_not_load_may_be_loaded_again(files: AdapterFiles) -> None:
    """Under the name that it has; if it fails again, the name stays."""
    async with scripted() as (scheduler, calls):
        scheduler.adapters["tuned"] = AdapterStatus(
            name="tuned", digest=files.digest, path="/moved", faults={"worker-0": "no file"}
        )
        scheduler.fault = "no file"
        with pytest.raises(AdapterRefused, match="no file"):
            await calls.load("tuned", files, replaces=False)
        assert [type(order) for order in scheduler.orders] == [LoadAdapter]
        scheduler.fault = ""

        await calls.load("tuned", files, replaces=False)

        assert scheduler.adapters["tuned"].workers == ("worker-0",)


@pytest.mark.parametrize("replaces", [False, True])
async def test_of_two_orders_at_once_one_is_carried_out(files: AdapterFiles, tmp_path: Path, *, replaces: bool) -> None:
    """The other caller is told, and takes nothing back."""
    other, first = (read_adapter(make_adapter(tmp_path / name, alpha=n)) for n, name in enumerate("ab", 1))
    async with scripted() as (scheduler, calls):
        if replaces:
            await calls.load("tuned", first, replaces=False)

        told = await asyncio.gather(
            calls.load("tuned", files, replaces=replaces),
            calls.load("tuned", other, replaces=replaces),
            return_exceptions=True,
        )

        (error,) = [each for each in told if each is not None]
        assert isinstance(error, AdapterConflict if replaces else InvalidRequest)
        assert scheduler.adapters["tuned"].digest == (files if told[0] is None else other).digest
        assert not any(isinstance(order, UnloadAdapter) for order in scheduler.orders)


async def test_an_order_that_was_overtaken_is_a_conflict(files: AdapterFiles, tmp_path: Path) -> None:
    """The scheduler is not called silent when another order changed what this one had done."""
    other = read_adapter(make_adapter(tmp_path / "other", alpha=1))
    async with scripted(hears=False) as (scheduler, calls):
        loading = asyncio.create_task(calls.load("tuned", files, replaces=False))
        await until(lambda: "tuned" in scheduler.adapters)
        scheduler.load(LoadAdapter(name="tuned", path="/other", digest=other.digest, expects=files.digest))
        calls.view.hear(msgspec.structs.replace(scheduler.status(), seq=scheduler.seq + 9), 0.0)

        with pytest.raises(AdapterConflict, match="came in between"):
            await loading


async def test_the_maximum_of_adapters_is_named(files: AdapterFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no conflict with another order."""
    monkeypatch.setattr("services.gateway.adapter_calls.MOST_ADAPTERS", 0)
    async with scripted() as (scheduler, calls):
        monkeypatch.setattr(scheduler, "load", lambda order: None)

        with pytest.raises(AdapterRefused, match="its maximum of 0 adapters"):
            await calls.load("tuned", files, replaces=False)


async def test_an_adapter_without_room_is_asked_for_again(files: AdapterFiles, tmp_path: Path) -> None:
    """While requests run with an unloaded one: the error passes, says so, and leaves everything as it was."""
    other = read_adapter(make_adapter(tmp_path / "other", alpha=1))
    async with scripted() as (scheduler, calls):
        await calls.load("tuned", files, replaces=False)
        scheduler.fault, scheduler.is_full = "an unloaded adapter still has 2 requests", True
        for name, replaces in (("tuned", True), ("new", False)):
            with pytest.raises(Unavailable, match="has no room yet: an unloaded adapter still has 2 requests") as error:
                await calls.load(name, other, replaces=replaces)
            assert error.value.retry_after_ms

        assert list(scheduler.adapters) == ["tuned"]
        assert scheduler.adapters["tuned"].replacement is None


async def test_unloading_what_is_not_there_is_not_found(files: AdapterFiles) -> None:
    """What is there goes."""
    async with scripted() as (scheduler, calls):
        await calls.load("tuned", files, replaces=False)

        await calls.unload("tuned")

        assert scheduler.orders[-1] == UnloadAdapter(name="tuned")
        with pytest.raises(NotFound):
            await calls.unload("tuned")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "a b", "lora_path": "/x"}, "lora_name"),
        ({"lora_name": FACTS.name, "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "a", "lora_path": "here"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "/nowhere"}, "lora_path"),
        ({"lora_name": "a"}, "lora_path"),
    ],
)
async def test_senseless_orders_are_refused(body: dict[str, Any], param: str | None) -> None:
    """Before the cell hears of them; and all orders without the admin key."""
    async with running_gateway(admin_key="key-of-operators") as harness:
        answer = await harness.client.post(
            "/v1/load_lora_adapter", json=body, headers={"X-Admin-Key": "key-of-operators"}
        )
        stranger = await harness.client.post("/v1/load_lora_adapter", json=body)
        other = await harness.client.post("/v1/unload_lora_adapter", json={"lora_name": "a"})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (stranger.status_code, other.status_code) == (401, 401)


def test_adapters_of_the_start_are_read_at_once(tmp_path: Path) -> None:
    """Every fault is told together."""
    good, other = make_adapter(tmp_path / "good"), make_adapter(tmp_path / "other")
    assert list(start_adapters([f"a={good}", f"b/c={other}"], "base").files) == ["a", "b/c"]

    with pytest.raises(ConfigError) as refusal:
        start_adapters(["a", f"base={good}", f"b={good}", f"b={good}", f"x={tmp_path}"], "base")

    faults = refusal.value.faults
    assert [fault.rpartition(": ")[2] for fault in faults[:3]] == [
        "give NAME=DIR, the name as model ids are",
        "the name base is taken",
        "the name b is taken",
    ]
    assert "holds no readable adapter_config.json" in faults[3]


async def test_a_gateway_is_ready_when_its_adapters_are(files: AdapterFiles) -> None:
    """Not before the scheduler has folded its orders, and not while workers read; a fault is told and keeps nobody
    waiting.
    """
    async with scripted() as (scheduler, calls):
        own, view = StartAdapters({"tuned": files}), calls.view
        assert own.reasons_not_ready(view) == ["adapter tuned was not asked for yet"]
        scheduler.is_slow = True

        await own.tell(scheduler.bus)

        assert own.reasons_not_ready(view) == ["adapter tuned is being loaded"]
        scheduler.adapters["tuned"] = AdapterStatus(
            name="tuned", digest=files.digest, path="x", faults={"worker-0": "no memory"}
        )
        view.hear(scheduler.status(), 0.0)
        assert own.reasons_not_ready(view) == []
        assert list(own.faults(view)) == [("tuned", "worker-0: no memory")]
        scheduler.adapters["tuned"] = AdapterStatus(
            name="tuned",
            digest=DIGEST,
            path="x",
            workers=("worker-0",),
            replacement=AdapterReplacement(digest=files.digest),
        )
        view.hear(scheduler.status(), 0.0)
        assert own.reasons_not_ready(view) == ["adapter tuned is being loaded"]
        del scheduler.adapters["tuned"]
        view.hear(scheduler.status(), 0.0)
        assert own.reasons_not_ready(view) == []


async def test_an_adapter_of_the_start_replaces_what_has_its_name(files: AdapterFiles) -> None:
    """In two steps, so that the earlier one serves until workers have the new one, or for good if they cannot."""
    async with scripted() as (scheduler, calls):
        scheduler.adapters["tuned"], scheduler.fault = TUNED, "no memory"
        own = StartAdapters({"tuned": files})

        await own.tell(scheduler.bus)

        (order,) = scheduler.orders
        assert isinstance(order, LoadAdapter)
        assert order.expects == DIGEST
        calls.view.hear(scheduler.status(), 0.0)
        assert own.reasons_not_ready(calls.view) == []
        assert list(own.faults(calls.view)) == [("tuned", "the earlier one is in force: worker-0: no memory")]


async def test_a_silent_scheduler_is_asked_again(files: AdapterFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway may be there long before it."""
    monkeypatch.setattr("services.gateway.adapter_start.RETRY_S", 0.0)
    tried = 0

    async def fold(self: CacheCalls, order: object, message_id: str) -> CellStatus:
        nonlocal tried
        tried += 1
        if tried < 3:
            raise Unavailable("silent")
        return scheduler.status()

    async with scripted() as (scheduler, _):
        monkeypatch.setattr(CacheCalls, "fold", fold)

        await StartAdapters({"tuned": files}).tell(scheduler.bus)

    assert tried == 3


async def test_every_adapter_that_a_worker_lacks_is_a_degradation() -> None:
    """Also one that an operator loaded, and a replacement that was given up. What no worker has is not served."""
    broken = AdapterStatus(name="broken", digest=DIGEST, path="/x", faults={"worker-0": "no file"})
    coming = AdapterReplacement(digest="f" * 32, faults={"worker-0": "no memory"})
    async with running_gateway() as harness:
        await hear(harness, broken, msgspec.structs.replace(TUNED, replacement=coming))
        health = (await harness.client.get("/health/ready")).json()
        refused = await harness.client.post("/v1/completions", json={"model": "gpt-4", "prompt": "sea"})
        lacks = [(lack.what, lack.reason) for lack in harness.gateway.degraded()]

    assert health["status"] == "degraded"
    assert lacks == [
        ("adapter broken", "worker-0: no file"),
        ("adapter tuned", "the earlier one is in force: worker-0: no memory"),
    ]
    assert f"serves {FACTS.name!r}, 'tuned'." in refused.json()["error"]["message"]


async def test_a_degraded_cell_names_the_adapter() -> None:
    """Health says which worker lacks it, and that a flag asked for it."""
    async with running_gateway() as harness:
        harness.gateway.adapters.files["tuned"] = AdapterFiles(Path("/x"), DIGEST, ())
        await hear(harness, AdapterStatus(name="tuned", digest=DIGEST, path="/x", faults={"worker-0": "no memory"}))

        (lack,) = harness.gateway.own_degraded()

    assert (lack.what, lack.reason, lack.setting) == ("adapter tuned", "worker-0: no memory", "--adapter")
