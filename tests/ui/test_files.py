"""The files of the page as the gateway serves them."""

from __future__ import annotations

import re

from services.gateway.ui.pages import read_files
from tests.unit.gateway.running_gateway import running_gateway


async def test_the_page_is_served_without_a_key_and_under_a_strict_policy() -> None:
    """It holds no secrets; scripts and styles come from this gateway alone, and nobody may frame it."""
    async with running_gateway(api_keys=("an-ordinary-key",), admin_key="an-admin-key-of-some-length") as harness:
        entrance = await harness.client.get("/ui")
        page = await harness.client.get("/ui/")
        script = await harness.client.get("/ui/main.js")

    assert (entrance.status_code, entrance.headers["location"]) == (307, "ui/")
    assert (page.status_code, script.status_code) == (200, 200)
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    for answer in (page, script):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_a_file_that_is_known_already_is_not_sent_again() -> None:
    """By its entity tag, which stands for its bytes."""
    async with running_gateway() as harness:
        first = await harness.client.get("/ui/style.css")
        again = await harness.client.get("/ui/style.css", headers={"if-none-match": first.headers["etag"]})
        other = await harness.client.get("/ui/style.css", headers={"if-none-match": '"another"'})

    assert (again.status_code, again.content) == (304, b"")
    assert other.content == first.content


async def test_only_the_files_of_the_page_are_served() -> None:
    """No path leads anywhere else, and a missing file is an error in the API's shape."""
    async with running_gateway() as harness:
        for path in ("/ui/pages.py", "/ui/..%2fpages.py", "/ui/%2e%2e/pages.py", "/ui/nothing.js"):
            answer = await harness.client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_route")


def test_scripts_import_only_files_that_are_there_and_make_no_markup() -> None:
    """Nothing is loaded from elsewhere, and text can never become HTML."""
    files = read_files()
    for name, file in files.items():
        text = file.body.decode()
        for imported in re.findall(r'from "([^"]+)"', text):
            assert imported.removeprefix("./") in files, f"{name} imports {imported}"
        assert not re.search(r"(inner|outer|Adjacent)HTML|document\.write|\beval\b", text), name
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
