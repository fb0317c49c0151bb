"""``thermocline top`` in a terminal of 80 by 24, as a person uses it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from pathlib import Path

import pyte
import pytest

from tests.ui.stand_in import KEY, StandIn, a_cell, serving
from tests.waiting import until
from thermocline.supervisor.ports import free_port
from thermocline.top.terminal import keys_in

WIDTH, HEIGHT = 80, 24


class Terminal:
    """A terminal with the command in it; ``lines`` are what a person sees."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.screen = pyte.Screen(WIDTH, HEIGHT)
        self._stream = pyte.ByteStream(self.screen)
        self.fd, self._inner = pty.openpty()
        self.resize(WIDTH, HEIGHT)
        self.before = termios.tcgetattr(self._inner)
        self.process = subprocess.Popen(
            command, stdin=self._inner, stdout=self._inner, stderr=self._inner, env=env, start_new_session=True
        )
        asyncio.get_running_loop().add_reader(self.fd, self._read)

    def _read(self) -> None:
        self._stream.feed(os.read(self.fd, 65_536))

    @property
    def text(self) -> str:
        """Everything on the screen."""
        return "\n".join(self.screen.display)

    @property
    def is_as_before(self) -> bool:
        """Whether the terminal echoes and edits lines as it did before the command."""
        return termios.tcgetattr(self._inner) == self.before

    def press(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def resize(self, width: int, height: int) -> None:
        """What a window manager does; the command is told by a signal."""
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.screen.resize(height, width)

    async def shows(self, text: str) -> None:
        """Wait until ``text`` is on the screen."""
        try:
            await until(lambda: text in self.text)
        except TimeoutError:
            raise AssertionError(f"{text!r} is not on the screen:\n{self.text}") from None

    async def ends(self) -> int:
        """Wait for the end of the command; its exit code."""
        await until(lambda: self.process.poll() is not None)
        return self.process.returncode

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self.fd)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.fd)
        os.close(self._inner)


@contextlib.asynccontextmanager
async def top(stand_in: StandIn, key_file: Path, *flags: str) -> AsyncIterator[Terminal]:
    """The command against a scripted gateway."""
    key_file.write_text(f"{KEY}\n")
    command = [sys.executable, "-m", "thermocline", "top", "--url", stand_in.url, "--interval", "0.1"]
    command += ["--admin-key-file", str(key_file), *flags]
    terminal = Terminal(command, {**os.environ, "TERM": "xterm-256color"})
    try:
        yield terminal
    finally:
        terminal.close()


async def test_views_change_with_keys_and_q_quits(tmp_path: Path) -> None:
    """Live, scrolled, held; at the end the terminal is as it was."""
    async with serving(StandIn()) as stand_in, top(stand_in, tmp_path / "key") as terminal:
        await terminal.shows("● live")
        await terminal.shows("running 5")
        stand_in.cell = a_cell(running=17)
        await terminal.shows("running 17")
        terminal.press(b"2")
        await terminal.shows("300 nodes")
        await terminal.shows("You are the h")
        terminal.press(b"\x1b[6~")
        await until(lambda: "You are the h" not in terminal.text)
        terminal.press(b"\x1b[H")
        await terminal.shows("You are the h")
        terminal.press(b"\t")
        await terminal.shows("90 % cached")
        terminal.press(b"4")
        await terminal.shows("leaving")
        terminal.press(b" ")
        await terminal.shows("held")
        terminal.press(b"q")

        assert await terminal.ends() == 0
        assert terminal.is_as_before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_quits_as_well(tmp_path: Path, number: signal.Signals) -> None:
    """Cleanly: exit code 0 and the terminal as it was."""
    async with serving(StandIn()) as stand_in, top(stand_in, tmp_path / "key") as terminal:
        await terminal.shows("● live")
        terminal.process.send_signal(number)

        assert await terminal.ends() == 0
        assert terminal.is_as_before


async def test_it_follows_the_size_of_its_window(tmp_path: Path) -> None:
    """The last line is the list of keys, at any size."""
    async with serving(StandIn()) as stand_in, top(stand_in, tmp_path / "key") as terminal:
        await terminal.shows("● live")
        terminal.resize(60, 14)
        terminal.process.send_signal(signal.SIGWINCH)
        await until(lambda: terminal.screen.display[13].startswith("1-4 or Tab"))
        terminal.press(b"q")
        await terminal.ends()


async def test_it_says_what_is_wrong_and_goes_on_when_it_is_right(tmp_path: Path) -> None:
    """A silent scheduler, a wrong key and a gateway that is gone are three different things."""
    stand_in = StandIn()
    async with contextlib.AsyncExitStack() as served:
        await served.enter_async_context(serving(stand_in, free_port()))
        async with top(stand_in, tmp_path / "key") as terminal:
            await terminal.shows("● live")
            stand_in.scheduler_error = "the scheduler is silent"
            await terminal.shows("● scheduler away")
            await terminal.shows("(the data below are old)")
            stand_in.scheduler_error = ""
            stand_in.key = "quite-another-admin-key"
            await terminal.shows("● unauthorised")
            stand_in.key = KEY
            await terminal.shows("● live")
            await served.aclose()
            await terminal.shows("● disconnected")
            async with serving(StandIn(), int(stand_in.url.rpartition(":")[2])):
                await terminal.shows("● live")
                terminal.press(b"q")
                assert await terminal.ends() == 0


async def test_one_frame_or_one_object_is_printed_without_a_terminal(tmp_path: Path) -> None:
    """For scripts; the exit code says whether the cell could be asked."""

    async def run(*flags: str) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "thermocline", "top", "--admin-key-file", str(tmp_path / "key"), *flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await process.communicate()
        return process.returncode or 0, out.decode(), err.decode()

    (tmp_path / "key").write_text(KEY)
    async with serving(StandIn()) as stand_in:
        frame = await run("--url", stand_in.url, "--once", "--view", "workers")
        told = await run("--url", stand_in.url, "--json")
        live = await run("--url", stand_in.url)
        senseless = await run("--url", "nowhere")
    gone = await run("--url", stand_in.url, "--once")

    assert frame[0] == told[0] == 0
    assert "worker-1" in frame[1]
    assert json.loads(told[1])["cell"]["running"] == 5
    assert len(json.loads(told[1])["requests"]) == 40
    assert (live[0], senseless[0], gone[0]) == (2, 2, 1)
    assert "ask for --once or --json" in live[2]
    assert (gone[1], gone[2].count("\n")) == ("", 1)
    assert gone[2].startswith("thermocline top: no answer from")


def test_keys_are_read_from_what_a_terminal_sends() -> None:
    """Several at once, in both forms of the arrows; what nobody knows is no key."""
    assert keys_in(b"2\x1b[A\x1bOB\tq") == ["2", "up", "down", "tab", "q"]
    assert keys_in(b"\x1b[200;5u") == []
    assert keys_in(b"\x1b") == []
