"""A page in the background has no stream: seven of one browser would wait for its six connections to a host."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path

import pytest

from tests.ui.stand_in import KEY, StandIn, a_cell, serving
from tests.waiting import until

NODE = shutil.which("node")

SCRIPT = """
import { createInterface } from "node:readline";
globalThis.window = globalThis;
globalThis.document = Object.assign(new EventTarget(), { hidden: false, baseURI: `${process.argv[2]}/ui/` });
const { keys } = await import("./api.js");
const { Feed } = await import("./feed.js");
keys.set(process.argv[3], "");
const feed = new Feed();
const tell = (...words) => console.log(JSON.stringify(words));
feed.addEventListener("link", () => tell("link", feed.link.state));
feed.addEventListener("cell", () => tell("cell", feed.cell.nodes));
createInterface({ input: process.stdin }).on("line", (line) => {
  document.hidden = line === "hide";
  document.dispatchEvent(new Event("visibilitychange"));
}).on("close", () => process.exit(0));
feed.start();
"""


class Page:
    """The page's feed in a process of its own, without a page around it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[str] = []

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())

    async def hears(self, line: str) -> None:
        """Wait until the feed tells this from now on."""
        assert self._process.stdout is not None
        async with asyncio.timeout(30):
            while (told := (await self._process.stdout.readline()).decode().strip()) != line:
                assert told, "the feed ended"
                self.lines.append(told)


@contextlib.asynccontextmanager
async def feeding(gateway: StandIn, folder: Path) -> AsyncIterator[Page]:
    """A feed of this gateway."""
    assert NODE is not None
    for entry in files("services.gateway.ui").joinpath("static").iterdir():
        if entry.name.endswith(".js"):
            (folder / entry.name).write_bytes(entry.read_bytes())
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "run.js").write_text(SCRIPT)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        NODE, str(folder / "run.js"), gateway.url, KEY, stdin=pipe, stdout=pipe
    )
    try:
        yield Page(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


@pytest.mark.skipif(NODE is None, reason="no Node.js: install it to run the page's feed without a browser")
async def test_a_page_in_the_background_asks_and_has_no_stream(tmp_path: Path) -> None:
    """It shows the cell all the same, is never said to be cut off, and has its stream again once it is seen."""
    async with serving(StandIn()) as gateway, feeding(gateway, tmp_path) as page:
        await page.hears('["link","live"]')
        page.tell("hide")
        await until(lambda: gateway.streams == 0)
        gateway.cell = a_cell(nodes=301)
        page.tell("hide")  # It asks again at once.
        await page.hears('["cell",301]')
        behind = gateway.streams
        page.tell("show")
        await until(lambda: gateway.streams == 1)
        gateway.cell = a_cell(nodes=302)
        await page.hears('["cell",302]')

    assert behind == 0
    assert {line for line in page.lines if line.startswith('["link"')} <= {'["link","live"]'}
