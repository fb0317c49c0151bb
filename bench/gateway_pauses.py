"""How long a gateway's event loop stands still while clients send what is large or hostile.

A real nats-server, scheduler and gateway, with the bundled model's tokenizer, a chat template that has a place for
tools, and a context of 131,072 tokens; no worker, so that requests wait in the queue until their clients leave
(``status`` 0), if they are not refused. A probe asks ``/health/live`` over one connection
again and again: each answer needs the loop, as each token of a stream does, so the longest wait for one is the longest
pause. It includes what the machine does besides, so each case has several rounds: what the gateway does happens in all
of them, and the median of their longest waits is held against the target. Another process plays the clients, four at a
time.

``python -m bench.gateway_pauses [--seconds 4] [--rounds 3] [--only CASE;CASE]``
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import multiprocessing
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench import results_file
from bench.scheduler_process import SERVER_NAME, start_scheduler, start_server
from thermocline.supervisor.config import bundled_model
from thermocline.supervisor.nats_server import wait_until_up
from thermocline.supervisor.ports import free_ports

CONTEXT = 131_072
TARGET_MS = 50.0
EVERY_S = 0.002
START_S = 60.0
CLIENTS = 4
DRIPPING = 1000
MIB = 2**20
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "does something", "parameters": {}},
}
PROSE = "The thermocline is where warm water ends, and 12,345 divers out of 67,890 have felt it on the way down.\n"


TEMPLATE = (
    "{{ '<s>' }}{% if tools %}{{ '<|system|>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|end|>' }}"
    "{% endif %}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The bundled model's, with tools."""


def text(nbytes: int) -> str:
    return (PROSE * (nbytes // len(PROSE) + 1))[:nbytes]


def chat(messages: list[dict[str, Any]], **more: Any) -> bytes:
    return json.dumps({"messages": messages, "max_tokens": 1, **more}).encode()


def tokenize(nbytes: int, **more: Any) -> bytes:
    return json.dumps({"prompt": text(nbytes), **more}).encode()


def messages(content: Any, count: int) -> bytes:
    """A body of Anthropic's API."""
    return json.dumps({"messages": [{"role": "user", "content": content}] * count, "max_tokens": 1}).encode()


def responses(count: int) -> bytes:
    return json.dumps({"input": [{"role": "user", "content": ""}] * count}).encode()


def tooled(count: int, **more: Any) -> bytes:
    """A chat with so many tools."""
    named = [{**TOOL, "function": {**TOOL["function"], "name": f"f{number}"}} for number in range(count)]
    return chat([{"role": "user", "content": "hi"}], tools=named, **more)


def schema(nbytes: int) -> bytes:
    """A chat whose answer keeps to a schema of about so many bytes."""
    properties: dict[str, Any] = {}
    while len(json.dumps(properties)) < nbytes - 200:
        properties |= {f"property_{len(properties) + more:05}": {"type": "string"} for more in range(16)}
    wanted = {"name": "wide", "schema": {"type": "object", "properties": properties}}
    return chat([{"role": "user", "content": "hi"}], response_format={"type": "json_schema", "json_schema": wanted})


def marked(count: int) -> bytes:
    """A chat of so many messages, four of which have a breakpoint."""
    plain, breakpoint_ = {"role": "user", "content": "a"}, {"cache_control": {"type": "ephemeral"}}
    quarter = [plain] * (count // 4 - 1) + [{**plain, **breakpoint_}]
    return chat(quarter * 4)


def turns(count: int) -> bytes:
    """A chat of so many turns, each with an answer that is looked for among those that were said here."""
    return chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * count)


CASES: dict[str, tuple[str, Callable[[], bytes]] | None] = {
    "quiet": None,
    "tokenize, 1 MiB": ("/tokenize", partial(tokenize, MIB)),
    "tokenize, 6 MiB": ("/tokenize", partial(tokenize, 6 * MIB)),
    "tokenize, 640 KiB": ("/tokenize", partial(tokenize, 640 * 1024)),
    "tokenize with strings, 640 KiB": ("/tokenize", partial(tokenize, 640 * 1024, return_token_strs=True)),
    "detokenize, 131,072 ids": ("/detokenize", lambda: json.dumps({"tokens": [300] * CONTEXT}).encode()),
    "chat, 400 KB": ("/v1/chat/completions", lambda: chat([{"role": "user", "content": text(400_000)}])),
    "chat, 100,000 messages": ("/v1/chat/completions", lambda: chat([{"role": "user", "content": ""}] * 100_000)),
    "chat, 1,000 tools": ("/v1/chat/completions", partial(tooled, 1000)),
    "chat, 100 tools, required": ("/v1/chat/completions", partial(tooled, 100, tool_choice="required")),
    "chat, 1,000 tools, required": ("/v1/chat/completions", partial(tooled, 1000, tool_choice="required")),
    "chat, schema of 64 KB": ("/v1/chat/completions", partial(schema, 64_000)),
    "chat, 40,000 messages, 4 kept": ("/v1/chat/completions", partial(marked, 40_000)),
    "chat, 100,000 parts": (
        "/v1/chat/completions",
        lambda: chat([{"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}]),
    ),
    "chat, 20,000 turns": ("/v1/chat/completions", partial(turns, 20_000)),
    "chat, 50,000 turns": ("/v1/chat/completions", partial(turns, 50_000)),
    "messages, 100,000": ("/v1/messages", partial(messages, "a", 100_000)),
    "messages, 45,000 with parts": ("/v1/messages", partial(messages, [{"type": "text", "text": "a"}], 45_000)),
    "count_tokens, 100,000": ("/v1/messages/count_tokens", partial(messages, "a", 100_000)),
    "responses, 100,000 items": ("/v1/responses", partial(responses, 100_000)),
    "input_tokens, 100,000 items": ("/v1/responses/input_tokens", partial(responses, 100_000)),
    "completion, 131,000 ids": ("/v1/completions", lambda: json.dumps({"prompt": [300] * 131_000}).encode()),
    "8 million ids": ("/v1/completions", lambda: b'{"prompt":[' + b"1," * (8 * MIB - 100) + b"1]}"),
    "5 million objects": (
        "/v1/chat/completions",
        lambda: b'{"messages":[{"role":"user","content":""}],"tools":[' + b"{}," * (5 * MIB) + b"{}]}",
    ),
    "a million values": ("/v1/completions", lambda: b'{"prompt":[' + b"1," * (MIB - 100) + b"1]}"),
    "nested a million deep": ("/v1/completions", lambda: b'{"prompt":"x","unknown":' + b"[" * 400_000),
    "a million escapes": ("/v1/completions", lambda: b'{"prompt":"' + b"\\u00e4" * (MIB - 1000) + b'"}'),
    "16 MiB of escapes": ("/v1/completions", lambda: b'{"prompt":"' + b"\\u00e4" * (2_700_000) + b'"}'),
    "1,000 dripping clients": ("", lambda: b""),
}


def play(port: int, path: str, body: bytes) -> None:
    """Send it over a few connections until this process is ended."""
    if not path:
        asyncio.run(_drip(port))
        return

    def send() -> None:
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                client = http.client.HTTPConnection("127.0.0.1", port, timeout=3.0)
                client.request("POST", path, body, {"content-type": "application/json"})
                client.getresponse().read()
                client.close()

    threads = [threading.Thread(target=send, daemon=True) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    threads[0].join()


async def _drip(port: int) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n"

    async def client(number: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head if number % 2 else head[:20])
                while True:
                    await asyncio.sleep(0.5)
                    writer.write(b" ")
                    await writer.drain()

    await asyncio.gather(*(client(number) for number in range(DRIPPING)))


def answered(port: int, path: str, body: bytes) -> int:
    """The status of the answer to one request, 0 for one that waits for a worker."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=10.0)
    try:
        client.request("POST", path, body, {"content-type": "application/json"})
        return client.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        client.close()


def probe(port: int, seconds: float) -> list[float]:
    """Milliseconds of each answer."""
    ask = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
    waits = []
    with socket.create_connection(("127.0.0.1", port), timeout=60.0) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            begun = time.perf_counter()
            connection.sendall(ask)
            _answer(connection)
            waits.append((time.perf_counter() - begun) * 1e3)
            time.sleep(EVERY_S)
    return waits


def _answer(connection: socket.socket) -> None:
    """Read one whole answer."""
    data = b""
    while b"\r\n\r\n" not in data or len(data) < _length(data):
        more = connection.recv(65_536)
        if not more:
            raise SystemExit("the gateway closed the probe's connection")
        data += more


def _length(data: bytes) -> int:
    head, _, _ = data.partition(b"\r\n\r\n")
    return len(head) + 4 + int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])


def measure(port: int, name: str, seconds: float) -> dict[str, Any]:
    """One case's waits, from half a second behind its beginning on."""
    case = CASES[name]
    player, status = None, None
    if case is not None:
        path, body = case
        status = answered(port, path, body()) if path else None
        player = multiprocessing.get_context("fork").Process(target=play, args=(port, path, body()), daemon=True)
        player.start()
        time.sleep(0.5)
    try:
        waits = sorted(probe(port, seconds))
    finally:
        if player is not None:
            player.kill()
            player.join()
    told = {} if status is None else {"status": status}
    return {
        **told,
        "asked": len(waits),
        "p50_ms": round(statistics.median(waits), 2),
        "p99_ms": round(waits[int(len(waits) * 0.99)], 2),
        "p100_ms": round(waits[-1], 2),
    }


@contextlib.contextmanager
def gateway(folder: Path) -> Iterator[int]:
    """The port of a gateway that serves nobody's answers."""
    model = folder / "model"
    shutil.copytree(bundled_model() or "", model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}), encoding="utf-8")
    tokenizer = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    told = json.dumps(tokenizer | {"chat_template": TEMPLATE})
    (model / "tokenizer_config.json").write_text(told, encoding="utf-8")
    server, nats_port = start_server(folder)
    (port,) = free_ports(1)
    url = f"nats://127.0.0.1:{nats_port}"
    processes: list[subprocess.Popen[bytes]] = [server]
    try:
        asyncio.run(wait_until_up(SERVER_NAME, "127.0.0.1", nats_port, timeout_s=START_S))
        processes.append(start_scheduler(url, None))
        flags = [
            "--tool-parser",
            "hermes",
            "--model",
            str(model),
            "--nats",
            url,
            "--port",
            str(port),
            "--log-level",
            "error",
        ]
        processes.append(subprocess.Popen([sys.executable, "-m", "services.gateway", *flags]))
        _wait_until_live(port)
        yield port
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGKILL)
            process.wait()


def _wait_until_live(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(0.2)
    raise SystemExit(f"the gateway did not answer within {START_S:g} s")


def main() -> None:
    parser = results_file.arguments(__doc__, "--out")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3, help="of each case")
    parser.add_argument("--only", default="", help="cases, separated by semicolons")
    options = parser.parse_args()
    names = [name for name in CASES if not options.only or name in options.only.split(";")]
    results: dict[str, Any] = {"target_loop_pause_p100_ms": TARGET_MS, "loop_pause_ms": {"p100": 0.0}, "cases": {}}
    for name in names:
        # Each has a gateway of its own, so that nothing is left over of the case before.
        with tempfile.TemporaryDirectory() as folder, gateway(Path(folder)) as port:
            probe(port, 1.0)
            rounds = [measure(port, name, options.seconds) for _ in range(options.rounds)]
        middle = sorted(rounds, key=lambda told: told["p100_ms"])[options.rounds // 2]
        found = results["cases"][name] = middle | {"rounds_p100_ms": [told["p100_ms"] for told in rounds]}
        longest = results["loop_pause_ms"]
        longest["p100"] = max(longest["p100"], found["p100_ms"])
        print(f"{name:34}", found, "" if found["p100_ms"] <= TARGET_MS else "over the target", flush=True)
    print(results_file.write("gateway_pauses", results, seed=0, out=options.out))


if __name__ == "__main__":
    main()
