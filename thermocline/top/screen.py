"""The live screen: polls the gateway, and redraws after each answer and each key."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import httpx
from rich.console import Console, Group
from rich.live import Live

from thermocline.top.frames import VIEWS, body_rows, frame
from thermocline.top.source import Snapshot, look
from thermocline.top.terminal import pressed_keys

PAGE_ROWS = 15


class Screen:
    """A live screen and its state: the view, the first visible row, and whether updates are held."""

    def __init__(self, console: Console, http: httpx.AsyncClient, view: str, interval_s: float) -> None:
        """Begin with ``view``, one of VIEWS; ``interval_s`` seconds pass between two polls.

        ``http`` is a client of one gateway, with the admin key if there is one; the caller closes it.
        """
        self._console = console
        self._http = http
        self._interval_s = interval_s
        self._view = view
        self._first = 0
        self._is_held = False
        self._snapshot = Snapshot()
        self._changed = asyncio.Event()
        self._opened_tree = asyncio.Event()

    async def run(self, fd: int) -> None:
        """Show the screen until ``q``, the end of the input, or a signal; ``fd`` is the terminal's."""
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stopped.set)
        loop.add_signal_handler(signal.SIGWINCH, self._changed.set)
        try:
            with pressed_keys(fd) as keys, Live(console=self._console, screen=True, auto_refresh=False) as live:
                work = [
                    asyncio.create_task(stopped.wait()),
                    asyncio.create_task(self._take(keys)),
                    asyncio.create_task(self._ask()),
                    asyncio.create_task(self._draw(live)),
                ]
                done, running = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                for task in done:
                    task.result()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH):
                loop.remove_signal_handler(number)

    async def _take(self, keys: asyncio.Queue[str]) -> None:
        while (key := await keys.get()) != "q":
            self.press(key)
            self._changed.set()

    def press(self, key: str) -> None:
        """Handle one key, by its name as in :mod:`terminal`; unknown keys do nothing."""
        place = VIEWS.index(self._view)
        views = {"tab": VIEWS[(place + 1) % len(VIEWS)], "back": VIEWS[place - 1]}
        views |= {str(number): name for number, name in enumerate(VIEWS, 1)}
        steps = {"up": -1, "down": 1, "page up": -PAGE_ROWS, "page down": PAGE_ROWS, "home": -(10**9), "end": 10**9}
        if key in views:
            self._view, self._first = views[key], 0
            if self._view == "tree":
                self._opened_tree.set()
        elif key == "space":
            self._is_held = not self._is_held
        elif key in steps:
            last = max(0, body_rows(self._snapshot, self._view, self._console.width) - 1)
            self._first = max(0, min(last, self._first + steps[key]))

    async def _ask(self) -> None:
        while True:
            if not self._is_held:
                self._snapshot = await look(self._http, self._snapshot, with_nodes=self._view == "tree")
                self._changed.set()
            # The tree needs more data, so opening it polls at once.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._opened_tree.wait()
            self._opened_tree.clear()

    async def _draw(self, live: Live) -> None:
        while True:
            width, height = self._console.size
            lines = frame(
                self._snapshot,
                self._view,
                width=width,
                height=height,
                first=self._first,
                is_held=self._is_held,
                address=str(self._http.base_url),
            )
            live.update(Group(*lines), refresh=True)
            self._changed.clear()
            await self._changed.wait()
