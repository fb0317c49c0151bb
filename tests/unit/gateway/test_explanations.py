"""Explanations: the parts of a time to first token, what a prompt was made of, and who may know."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from services.gateway.keys import tenant_id
from services.gateway.pending import Choice, Generation
from services.gateway.recent_requests import Figures, RecentRequest, RecentRequests
from services.gateway.views.explanation import explain, prompt_parts, time_parts, ways_told
from shared import subjects
from shared.codec import decode, encode
from shared.errors import RequestCancelled, Unavailable
from shared.messages.explanations import Admission, Admissions, CostPart, GetAdmissions, PromptSpan, Wait, WeighedWay
from shared.messages.tokens import Timing, TokenItem, Usage
from tests.scripted_cell import submit
from tests.unit.gateway.running_gateway import Harness, running_gateway, says

KEY = "an-admin-key-of-some-length"
ADMIN = {"x-admin-key": KEY}
MS = 1_000_000
T0 = 1_700_000_000_000 * MS


def at(milliseconds: float) -> int:
    return T0 + round(milliseconds * MS)


def timing(**changes: int) -> Timing:
    known = Timing(received_ns=T0, accepted_ns=at(3), admitted_ns=at(20), started_ns=at(22), first_token_ns=at(40))
    return msgspec.structs.replace(known, **changes)


def figures(**changes: object) -> Figures:
    fields: dict[str, object] = {
        "state": "finished", "finish_reason": "length", "error_code": None, "completion_tokens": 4,
        "workers": {1: "worker-0"}, "received_ns": T0, "submitted_ns": at(1), "delivered_ns": at(41),
        "ended_ns": at(60), "timing": timing(), "usage": Usage(device_tokens=16, computed_tokens=10),
        "importance": None,
    }  # fmt: skip
    return Figures(**{**fields, **changes})  # type: ignore[arg-type]


def admission(**changes: object) -> Admission:
    fields: dict[str, object] = {
        "request_id": "r-0", "attempt": 1, "worker_id": "worker-0", "accepted_ns": at(3), "admitted_ns": at(18),
        "prompt": (PromptSpan(start=0, end=26, source="computed", reason="other_salt"),),
    }  # fmt: skip
    return Admission(**{**fields, **changes})  # type: ignore[arg-type]


def named(made: Figures, admitted: Admission | None = None) -> list[tuple[str, float]]:
    return [(part.name, part.ms) for part in time_parts(made, admitted)]


def test_parts_follow_one_another_and_add_up() -> None:
    """Waits interrupt the queue; loads and restorations come before computing."""
    waits = (
        Wait(kind="deferral", start_ns=at(4), end_ns=at(9)),
        Wait(kind="prefetch_wait", start_ns=at(10), end_ns=at(17)),
    )
    made = figures(timing=timing(loaded_ns=at(25), restored_ns=at(30)))

    assert named(made, admission(waits=waits)) == [
        ("accept", 1), ("broker", 2), ("queue", 1), ("deferral", 5), ("queue", 1), ("prefetch_wait", 7), ("queue", 1),
        ("broker", 2), ("queue", 2), ("load", 3), ("restore", 5), ("compute", 10), ("deliver", 1),
    ]  # fmt: skip
    assert sum(part.ms for part in time_parts(made, None)) == 41


def test_without_the_scheduler_the_queue_is_one_part() -> None:
    """It holds what the scheduler could have told apart."""
    assert named(figures()) == [("accept", 1), ("broker", 2), ("queue", 19), ("compute", 18), ("deliver", 1)]


@pytest.mark.parametrize("skew_ms", [-1000, 1000])
def test_clocks_that_disagree_change_no_sum(skew_ms: int) -> None:
    """A worker's clock that is off moves time from one part to another, and none below 0."""
    late = skew_ms * MS
    off = timing(admitted_ns=at(20) + late, started_ns=at(22) + late, first_token_ns=at(40) + late)

    parts = named(figures(timing=off), admission())

    assert sum(ms for _, ms in parts) == 41
    assert all(ms > 0 for _, ms in parts)


def test_a_first_item_that_got_lost_leaves_its_time_in_one_part() -> None:
    """The worker's times were in it."""
    assert named(figures(timing=None)) == [("accept", 1), ("compute", 40)]


def test_before_the_first_token_the_parts_end_where_it_is_known() -> None:
    """And there is no time to it."""
    waiting = figures(delivered_ns=0, ended_ns=0, timing=None, usage=None, workers={}, state="queued")

    assert named(waiting) == [("accept", 1)]
    assert prompt_parts(26, None, None, is_admin=True) == []


def test_ways_are_told_in_milliseconds() -> None:
    """With bytes and observed times where there are any; none where nothing was weighed."""
    parts = (CostPart(name="keys", us=1500, nbytes=4096, took_us=700), CostPart(name="compute", us=250))
    weighed = (WeighedWay(way="sparse", us=1750, parts=parts, is_taken=True),)

    (way,) = ways_told(admission(ways=weighed))

    assert (way.way, way.taken, way.ms) == ("sparse", True, 1.75)
    assert [(part.name, part.ms, part.bytes, part.took_ms) for part in way.parts] == [
        ("keys", 1.5, 4096, 0.7),
        ("compute", 0.25, None, None),
    ]
    assert ways_told(None) == ways_told(admission()) == []


def test_a_forgotten_request_is_explained_by_its_usage() -> None:
    """Sources are known, reasons are not."""
    parts = prompt_parts(26, Usage(device_tokens=8, disk_tokens=8, hidden_tokens=2), None, is_admin=False)

    assert [(part.start, part.end, part.source, part.reason) for part in parts] == [
        (0, 8, "device", None), (8, 16, "disk", None), (16, 18, "hidden", None), (18, 26, "computed", "unknown"),
    ]  # fmt: skip


def test_how_something_left_is_told_in_words() -> None:
    """With what is known of it."""
    span = PromptSpan(
        start=0, end=16, source="computed", reason="evicted", departure="evicted", tier="host", policy="lru",
        at_ns=at(18) - 2_500 * MS,
    )  # fmt: skip
    (part,) = prompt_parts(16, None, admission(prompt=(span,)), is_admin=False)

    assert part.detail == "evicted from host memory by policy lru 2.5 s before this request was admitted"


def test_another_tenants_prefix_is_told_to_operators_alone() -> None:
    """A tenant must not learn what others keep."""
    told = [prompt_parts(26, None, admission(), is_admin=is_admin)[0].reason for is_admin in (True, False)]

    assert told == ["other_salt", "never_stored"]


def test_the_attempt_of_the_first_token_is_explained() -> None:
    """Later ones have a prefix of their own to tell of."""
    second = admission(attempt=2, prompt=(PromptSpan(start=0, end=26, source="device"),))
    known = RecentRequest("http-1", "r", "r-0", "0" * 32, "", "/v1/completions", "m", 26, 0, None, 0.0)
    known.ended = figures(workers={1: "worker-0", 2: "worker-1"})
    known.admissions = (admission(), second)

    made = explain(known, 0.0, str, is_admin=True)

    assert (made.attempts, made.workers, made.prompt[0].source) == (2, ["worker-0", "worker-1"], "computed")
    assert (made.ttft_ms, made.total_ms) == (41, 60)


class Answers:
    """Generations of one choice, as an answer makes them, on a clock that a test moves."""

    def __init__(self, most: int = 4) -> None:
        self.now_s = 100.0
        self.recent = RecentRequests(lambda: self.now_s, most=most, kept_s=60)

    def begin(self, name: str, tenant: str = "") -> Generation:
        request = submit(f"{name}-0", [*range(8)])
        choice = Choice(msgspec.structs.replace(request, received_ns=T0, tenant=tenant), 0, 0, self.now_s)
        choice.submitted_ns = at(1)
        generation = Generation([choice])
        self.recent.begin(generation, http_id=f"http-{name}", endpoint="/v1/completions")
        return generation

    def end(self, generation: Generation) -> None:
        self.recent.end(generation)


def test_a_request_is_found_by_each_of_its_names() -> None:
    """Of the HTTP response, of the answer and of the choice."""
    answers = Answers()
    answers.begin("a")

    assert {id(answers.recent.find(name)) for name in ("a", "a-0", "http-a")} == {id(answers.recent.find("a-0"))}
    assert answers.recent.find("b") is None


def test_a_tenant_with_many_requests_displaces_only_its_own() -> None:
    """The oldest of them, beyond the bound of all."""
    answers = Answers(most=4)
    answers.begin("a", "one")
    for number in range(20):
        answers.begin(f"b{number}", "two")
    answers.begin("c", "three")

    assert [known.answer_id for known in answers.recent.newest_first()] == ["c", "b19", "b18", "a"]
    assert answers.recent.find("b17") is None
    assert answers.recent.find("http-b17") is None


def test_figures_follow_a_choice_to_its_end() -> None:
    """And nothing of prompt or answer stays behind."""
    answers = Answers()
    generation = answers.begin("a")
    known = answers.recent.find("a")
    assert known is not None
    assert known.figures(answers.now_s).state == "queued"
    answers.now_s += 0.5
    generation.choices[0].accept("w", TokenItem(request_id="a-0", attempt=1, index=0, tokens=(1,)), answers.now_s)
    assert known.figures(answers.now_s).state == "running"
    answers.now_s += 1
    last = TokenItem(request_id="a-0", attempt=1, index=1, tokens=(2,), finish="length")
    generation.choices[0].accept("w", last, answers.now_s)
    answers.end(generation)

    ended = known.figures(answers.now_s)
    assert (ended.state, ended.finish_reason, ended.completion_tokens) == ("finished", "length", 2)
    assert (ended.delivered_ns, ended.ended_ns) == (at(501), at(1501))
    assert known.choice is None


@pytest.mark.parametrize(
    ("error", "state"), [(RequestCancelled("gone"), "cancelled"), (Unavailable("no worker"), "failed")]
)
def test_an_end_without_an_answer_is_told(error: Exception, state: str) -> None:
    """With the error's code."""
    answers = Answers()
    generation = answers.begin("a")
    generation.choices[0].fail(error)  # type: ignore[arg-type]
    answers.end(generation)
    known = answers.recent.find("a")

    assert known is not None
    ended = known.figures(answers.now_s)
    assert (ended.state, ended.error_code, ended.finish_reason) == (state, error.code, None)  # type: ignore[attr-defined]


def test_requests_are_forgotten_by_number_and_by_age() -> None:
    """With all their names; one that is in progress does not grow old."""
    answers = Answers(most=3)
    running = answers.begin("running")
    answers.end(answers.begin("old"))
    answers.now_s += 61
    assert [known.request_id for known in answers.recent.newest_first()] == ["old-0", "running-0"]
    answers.end(running)
    assert list(answers.recent.newest_first()) == []
    for name in "abcd":
        answers.end(answers.begin(name))

    assert [known.answer_id for known in answers.recent.newest_first()] == ["d", "c", "b"]
    assert answers.recent.find("http-a") is None


@contextlib.asynccontextmanager
async def explained(**settings: Any) -> AsyncIterator[Harness]:
    """A gateway whose scheduler knows every request."""
    async with running_gateway(says("hello you"), admin_key=KEY, **settings) as harness:

        async def answer(data: bytes) -> bytes:
            call = decode(data, GetAdmissions)
            found = tuple(admission(request_id=name) for name in call.request_ids)
            return encode(Admissions(admissions=found))

        serving = await harness.cell.bus.serve(subjects.rpc("scheduler", "admissions"), answer)
        yield harness
        await serving.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_answer_brings_its_explanation_on_request(path: str) -> None:
    """Whole or as a stream's last chunk, and only then."""
    body = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    async with explained() as harness:
        plain = (await harness.client.post(path, json=body)).json()
        whole = await harness.client.post(path, json=body | {"explain": True})
        stream = await harness.client.post(path, json=body | {"explain": True, "stream": True})
        later = await harness.client.get(f"/v1/requests/{whole.json()['id']}/explain")

    assert "explanation" not in plain
    told = whole.json()["explanation"]
    assert (told["object"], told["id"]) == ("request.explanation", whole.headers["x-request-id"])
    assert (told["endpoint"], told["model"], told["state"]) == (path, "test-model", "finished")
    assert told["request_id"] == f"{whole.json()['id']}-0"
    chunks = [msgspec.json.decode(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
    assert [bool(chunk.get("explanation")) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"] == []
    assert later.json() == told


async def test_the_scheduler_is_told_which_requests_are_over() -> None:
    """It may learn of an end later than the gateway does, and knows all that was restored only then."""
    questions: list[GetAdmissions] = []
    async with running_gateway(says("hello you"), admin_key=KEY) as harness:

        async def answer(data: bytes) -> bytes:
            questions.append(decode(data, GetAdmissions))
            return encode(Admissions())

        serving = await harness.cell.bus.serve(subjects.rpc("scheduler", "admissions"), answer)
        whole = await harness.client.post("/v1/completions", json={"prompt": "hi", "explain": True})
        await harness.client.get(f"/v1/requests/{whole.json()['id']}/explain")
        await serving.close()

    name = whole.json()["explanation"]["request_id"]
    assert questions == [GetAdmissions(request_ids=(name,), ended=(name,))] * 2


async def test_a_silent_scheduler_costs_reasons_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The explanation says what the gateway and the worker know."""
    monkeypatch.setattr("services.gateway.explaining.CALL_S", 0.05)
    async with running_gateway(says("hello you")) as harness:
        told = (await harness.client.post("/v1/completions", json={"prompt": "hi", "explain": True})).json()

    assert told["explanation"]["prompt"][-1]["reason"] == "unknown"
    assert told["explanation"]["ttft_ms"] > 0


async def test_a_request_that_could_not_be_submitted_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was not its client who gave up."""
    monkeypatch.setattr("services.gateway.dispatcher.SUBMIT_S", 0.05)
    async with explained() as harness:

        async def refuse(*_: object, **__: object) -> int:
            raise Unavailable("the broker is away")

        monkeypatch.setattr(harness.bus, "append", refuse)
        refused = await harness.client.post("/v1/completions", json={"prompt": "hi"})
        name = refused.headers["x-request-id"]
        told = (await harness.client.get(f"/v1/requests/{name}/explain")).json()

    assert refused.status_code == 503
    assert (told["state"], told["error_code"], told["ttft_ms"]) == ("failed", "service_unavailable", None)


async def test_a_tenant_sees_its_own_requests_and_the_admin_key_sees_all() -> None:
    """Others' do not exist for it, and no key opens nothing."""
    async with explained(api_keys=["one", "two"]) as harness:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        answers = [
            (await harness.client.post("/v1/completions", json={"prompt": "hi"}, headers=key)).json()["id"]
            for key in (one, two)
        ]
        path = f"/v1/requests/{answers[0]}/explain"
        codes = [(await harness.client.get(path, headers=headers)).status_code for headers in (one, two, ADMIN, {})]
        listed = [
            [
                entry["request_id"]
                for entry in (await harness.client.get("/v1/requests", headers=headers)).json()["data"]
            ]
            for headers in (one, two, ADMIN)
        ]
        known = harness.gateway.recent.find(answers[0])

    assert codes == [200, 404, 200, 401]
    assert listed == [[f"{answers[0]}-0"], [f"{answers[1]}-0"], [f"{answers[1]}-0", f"{answers[0]}-0"]]
    assert known is not None
    assert known.tenant == tenant_id(b"one")


async def test_all_that_are_kept_are_listed_page_by_page() -> None:
    """The last of a page leads to the next; behind one that is forgotten there is nothing."""
    async with explained() as harness:
        for _ in range(3):
            await harness.client.post("/v1/completions", json={"prompt": "hi"})
        pages: list[list[str]] = []
        more, after = True, dict[str, str]()
        while more:
            answer = await harness.client.get("/v1/requests", params={"limit": 2, **after}, headers=ADMIN)
            page, more = [one["request_id"] for one in answer.json()["data"]], answer.json()["has_more"]
            after = {"after": page[-1]}
            pages.append(page)
        forgotten = await harness.client.get("/v1/requests", params={"after": "no-longer-kept"}, headers=ADMIN)

    assert [len(page) for page in pages] == [2, 1]
    assert len({one for page in pages for one in page}) == 3
    assert (forgotten.json()["data"], forgotten.json()["has_more"]) == ([], False)


async def test_without_api_keys_the_list_asks_for_the_admin_key() -> None:
    """All callers are alike then, and an id that is known is the only thing that tells them apart."""
    async with explained() as harness:
        made = (await harness.client.post("/v1/completions", json={"prompt": "hi"})).json()["id"]
        closed = await harness.client.get("/v1/requests")
        opened = await harness.client.get("/v1/requests", params={"limit": 1}, headers=ADMIN)
        wrong = await harness.client.get("/v1/requests", params={"limit": 101}, headers=ADMIN)
        own = await harness.client.get(f"/v1/requests/{made}/explain")

    assert (closed.status_code, closed.json()["error"]["code"]) == (401, "invalid_admin_key")
    assert (len(opened.json()["data"]), opened.json()["has_more"]) == (1, False)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "limit")
    assert own.status_code == 200
