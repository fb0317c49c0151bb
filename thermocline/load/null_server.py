"""A server that computes nothing: figures measured against it are the client's own share.

It answers with as many tokens as requested, the first at once and the others one every ``--itl-ms``. It is a process of
its own, as a real server is, and ends when its standard input does, so that none is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import uvloop

from shared.errors import Unavailable
from thermocline.load.clock import MonotonicClock

_MAX_BODY_BYTES = 64 * 2**20
_MODELS = b'{"object":"list","data":[{"id":"null","object":"model","max_model_len":1048576,"vocab_size":32000}]}'
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_TOKEN = {"choices": [{"index": 0, "text": " word", "delta": {"content": " word"}, "token_ids": [9]}]}


class _Asked(msgspec.Struct):
    max_tokens: int
    prompt: str | list[int] = ""


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(value: object) -> bytes:
    return _chunk(b"data: " + msgspec.json.encode(value) + b"\n\n")


_TOKEN_EVENT = _event(_TOKEN)


async def _answer(asked: _Asked, writer: asyncio.StreamWriter, itl_s: float) -> None:
    clock = MonotonicClock()
    writer.write(_STREAM_HEAD)
    began_s = clock.now_s()
    for number in range(asked.max_tokens):
        if itl_s and number:
            # Counted from the beginning, so that a late timer does not delay all later tokens.
            await clock.sleep_until(began_s + number * itl_s)
        writer.write(_TOKEN_EVENT)
        await writer.drain()
    usage = {"prompt_tokens": len(asked.prompt), "completion_tokens": asked.max_tokens}
    usage["total_tokens"] = sum(usage.values())
    ended = {"choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": "length"}]}
    writer.write(_event(ended) + _event({"choices": [], "usage": usage}) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    await writer.drain()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, itl_s: float) -> None:
    """Serve one connection, request after request, until either side closes it."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            _, is_sized, rest = head.partition(b"content-length:")
            length = int(rest.split(b"\r\n", 1)[0]) if is_sized else 0
            if length > _MAX_BODY_BYTES:
                return
            body = await reader.readexactly(length)
            if head.startswith(b"get "):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(_MODELS), _MODELS))
                await writer.drain()
            else:
                await _answer(msgspec.json.decode(body, type=_Asked), writer, itl_s)
    except (OSError, EOFError, asyncio.LimitOverrunError, ValueError):
        pass  # The client is gone or sent an invalid request.
    except asyncio.CancelledError:
        pass  # The server ends. Python 3.11 prints a traceback for a connection whose task ends as cancelled.
    finally:
        writer.close()


async def _run(itl_s: float) -> None:
    server = await asyncio.start_server(lambda reader, writer: _serve(reader, writer, itl_s), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


@contextmanager
def null_server(itl_ms: float) -> Iterator[str]:
    """Run a null server and yield its base URL. Raises Unavailable when it does not start."""
    command = [sys.executable, "-m", "thermocline.load.null_server", "--itl-ms", str(itl_ms)]
    # A session of its own: an interrupt at the terminal is for the client, which then closes the input.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            # A process that ends without output closes the pipe, so this cannot wait for ever.
            port = process.stdout.readline().strip()
            if not port.isdigit():
                raise Unavailable("the null server did not start")
            yield f"http://127.0.0.1:{port.decode()}"
        finally:
            process.stdin.close()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    """Serve until standard input ends; print the port in the first line."""
    parser = argparse.ArgumentParser(prog="python -m thermocline.load.null_server", description=__doc__)
    parser.add_argument("--itl-ms", type=float, default=0.0, help="time between tokens")
    options = parser.parse_args()
    # The loop's shutdown cancels connections that are still open.
    uvloop.run(_run(options.itl_ms / 1e3))


if __name__ == "__main__":
    main()
