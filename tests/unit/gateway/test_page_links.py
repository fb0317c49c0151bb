"""Links that open the page once."""

from __future__ import annotations

from services.gateway.page_links import KEPT_S, MOST_LINKS, PageLinks
from tests.unit.gateway.running_gateway import running_gateway

KEY = "an-admin-key-of-some-length"
ADMIN = {"x-admin-key": KEY}


async def test_a_link_is_made_under_the_admin_key_and_exchanged_for_it_once() -> None:
    """The code alone opens, and no cache keeps the answer; a second use is answered like a made-up code."""
    async with running_gateway(admin_key=KEY) as harness:
        refused = await harness.client.post("/v1/cell/page-link")
        link = (await harness.client.post("/v1/cell/page-link", headers=ADMIN)).json()
        codes = (link["code"], link["code"], "made-up")
        answers = [await harness.client.post("/ui/key", json={"code": code}) for code in codes]

    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_admin_key")
    assert link["path"] == f"/ui#once={link['code']}"
    assert answers[0].json()["admin_key"] == KEY
    assert answers[0].headers["cache-control"] == "no-store"
    assert [answer.json()["error"]["code"] for answer in answers[1:]] == ["page_link_used", "page_link_used"]


async def test_a_gateway_without_an_admin_key_makes_none() -> None:
    """There is nothing to exchange it for; and no code is as good as a wrong one."""
    async with running_gateway() as harness:
        made = await harness.client.post("/v1/cell/page-link")
        used = await harness.client.post("/ui/key", json={"code": "any"})
        empty = await harness.client.post("/ui/key", json={"code": ""})

    assert (made.status_code, used.status_code, empty.status_code) == (403, 404, 400)


def test_links_are_bounded_in_number_and_time() -> None:
    """The oldest is forgotten first; a day later none opens."""
    now_s = 0.0
    links = PageLinks(lambda: now_s)
    codes = [links.make() for _ in range(MOST_LINKS + 1)]

    assert len(set(codes)) == len(codes)
    assert not links.use(codes[0])
    assert links.use(codes[1])
    now_s = KEPT_S + 1
    assert not links.use(codes[2])
