"""Keep a prefix in host memory and on disk for a time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import aiofiles
import msgspec

from services.gateway.openai_schema.cache import Pin
from services.gateway.views.cache_view import pin_view
from shared.broker import add_broker_flags, broker_of
from shared.errors import OperatorError, reason_of
from shared.ids import new_id
from shared.messages.base import pack_int32
from shared.messages.cell_events import PinPrefix
from shared.undecodable import UNDECODABLE
from thermocline.cache import argument_types, gateway_client
from thermocline.cache.connection import cell, namespace_of

SUMMARY = "keep a prefix in host memory and on disk for a time"
TTL = "1h"
MAX_BYTES = 64 * 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    add_broker_flags(parser)
    prefix = parser.add_mutually_exclusive_group(required=True)
    prefix.add_argument("--tokens-file", metavar="FILE", help="JSON array of token ids")
    prefix.add_argument("--prompt", metavar="TEXT", help="text, which the gateway at --url tokenises")
    prefix.add_argument("--prompt-file", metavar="FILE", help="file with such a text")
    gateway_client.add_gateway(parser, "pin")
    parser.add_argument(
        "--ttl",
        type=argument_types.duration_ms,
        default=TTL,
        metavar="TIME",
        help="time to hold it: 1h, 30m or 3600s",
    )
    parser.add_argument("--salt", default="", metavar="TEXT", help="cache_salt of the requests that use the prefix")
    parser.add_argument(
        "--name",
        metavar="NAME",
        type=argument_types.name,
        help="name of the pin; renews an existing pin",
    )


async def run(arguments: argparse.Namespace) -> bool:
    """Set the pin and print what it holds."""
    name = arguments.name or new_id("pin")
    pin = await (_over_http(arguments, name) if arguments.url else _over_nats(arguments, name))
    print(json.dumps(msgspec.to_builtins(pin)) if arguments.json else pin_text(pin))
    return True


def pin_text(pin: Pin) -> str:
    """Return one line on the pin, and a second where a part of the prefix is not held yet."""
    text = f"pin {pin.name}: holds {pin.held_tokens:,} of {pin.tokens:,} tokens in {pin.pages:,} host pages"
    if pin.held_tokens < pin.tokens:
        text += "\nThe rest is held as copies of it come to host memory, in whole pages and within the pins' budget."
    return text


async def _over_nats(arguments: argparse.Namespace, name: str) -> Pin:
    if not arguments.tokens_file:
        raise OperatorError(
            "--prompt and --prompt-file need --url, because a gateway tokenises them; --tokens-file does not"
        )
    tokens = await read_tokens(Path(arguments.tokens_file))
    async with cell(broker_of(arguments)) as calls:
        order = PinPrefix(
            pin_id=name,
            namespace=await namespace_of(calls, arguments.salt),
            tokens=pack_int32(tokens),
            ttl_ms=arguments.ttl,
        )
        return pin_view(await calls.pin(order))


async def _over_http(arguments: argparse.Namespace, name: str) -> Pin:
    body: dict[str, Any] = {"name": name, "ttl_s": arguments.ttl / 1000}
    if arguments.salt:
        body["cache_salt"] = _utf8("--salt", arguments.salt)
    if arguments.tokens_file:
        body["tokens"] = await read_tokens(Path(arguments.tokens_file))
    elif arguments.prompt is not None:
        body["prompt"] = _utf8("--prompt", arguments.prompt)
    else:
        body["prompt"] = await read_text(Path(arguments.prompt_file))
    headers = gateway_client.admin_headers(arguments.url, arguments.admin_key)
    async with gateway_client.client(arguments.url, headers) as http:
        answer = await gateway_client.post(http, "/v1/cache/pins", body)
    return msgspec.convert(answer, Pin)


def _utf8(flag: str, text: str) -> str:
    """Return the text. Raises OperatorError where the command line had bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OperatorError(f"{flag} is not UTF-8 at character {error.start + 1}") from error
    return text


async def read_text(path: Path) -> str:
    """Read a whole UTF-8 file. Raises OperatorError, also for one that is longer than any context."""
    try:
        async with aiofiles.open(path, "rb") as file:
            raw = await file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise OperatorError(f"{path} is larger than {MAX_BYTES} bytes")
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"cannot read {path}: {reason_of(error)}") from error


async def read_tokens(path: Path) -> list[int]:
    """Read a file with one JSON array of token ids; at least one, each below 2^31. Raises OperatorError."""
    try:
        tokens = msgspec.json.decode(await read_text(path), type=list[int])
    except UNDECODABLE as error:
        raise OperatorError(f"{path} is no JSON array of token ids: {error}") from error
    if not tokens or min(tokens) < 0 or max(tokens) >= 2**31:
        raise OperatorError(f"{path} must hold at least one token id, from 0 to {2**31 - 1}")
    return tokens
