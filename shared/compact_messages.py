"""Compact forms of the messages that carry tokens and page numbers, and back.

A form is another set of fields of the same message. A save has a message of its own (``SaveTokens``): with a sixteenth
field every ``SaveChunks`` would begin with other bytes. Only receivers that announced them (``takes_compact``) get
these forms. Tokens are in :mod:`shared.compact_tokens`, page tables in :mod:`shared.page_runs`; fields that the
receiver can compute, such as identities of pages whose tokens it gets, are left out. Where a form is longer than the
plain one, which happens only for the shortest, the message stays as it is. Both ways are pure, and each field is
restored to the byte.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from shared.compact_tokens import compacted, expanded
from shared.errors import CodecError
from shared.ids import DIGEST_BYTES, TOKEN_BYTES, chain_pages
from shared.messages.requests import SubmitRequest
from shared.messages.storage_events import ChunksSaved
from shared.messages.storage_plans import SaveChunks, SaveOrder, SaveTokens
from shared.messages.worker_plans import AdmitRequest
from shared.page_runs import pages_of, runs_of

_NAME_BYTES = 16
"""About the bytes of a field's name and its head: a compact form must save more to be worth its field."""

_SAVED_ALIKE = tuple(
    name for name in SaveTokens.__struct_fields__ if name in SaveChunks.__struct_fields__ and name != "tokens"
)
"""Fields of a save that are equal in both forms."""


def compact_request(request: SubmitRequest) -> SubmitRequest:
    """Return the request with its prompt, or its tail behind a base, in compact form."""
    tokens = request.prompt if request.base is None else request.tail
    compact = compacted(tokens)
    return replace(request, prompt=b"", tail=b"", compact=compact) if _is_worth_it(compact, tokens) else request


def whole_request(request: SubmitRequest) -> SubmitRequest:
    """Return the request in its plain form. Raises CodecError."""
    if not request.compact:
        return request
    _check_once(request.prompt, request.tail)
    tokens = expanded(request.compact)
    if request.base is None:
        return replace(request, prompt=tokens, compact=b"")
    return replace(request, tail=tokens, compact=b"")


def compact_admission(order: AdmitRequest) -> AdmitRequest:
    """Return the order with its tokens and its page table in compact form, each where that is shorter."""
    compact, runs = compacted(order.tokens), runs_of(order.pages)
    if _is_worth_it(compact, order.tokens):
        order = replace(order, tokens=b"", compact=compact)
    return replace(order, pages=b"", page_runs=runs) if _is_worth_it(runs, order.pages) else order


def whole_admission(order: AdmitRequest) -> AdmitRequest:
    """Return the order in its plain form. Raises CodecError."""
    if order.compact:
        _check_once(order.tokens)
        order = replace(order, tokens=expanded(order.compact), compact=b"")
    if order.page_runs:
        _check_once(order.pages)
        order = replace(order, pages=pages_of(order.page_runs), page_runs=b"")
    return order


def compact_save(order: SaveChunks) -> SaveTokens:
    """Return the order in compact form. Its identities follow from ``parent`` and its tokens."""
    return SaveTokens(
        tokens=compacted(order.tokens),
        host_runs=runs_of(order.host_pages),
        device_runs=runs_of(order.device_pages),
        **_in_both_forms(order),
    )


def whole_save(order: SaveOrder, page_size: int) -> SaveChunks:
    """Return the order in its plain form; pages are of ``page_size`` tokens. Raises CodecError."""
    if isinstance(order, SaveChunks):
        return order
    tokens = expanded(order.tokens)
    if len(order.parent) != DIGEST_BYTES:
        raise CodecError(f"{order.parent.hex() or 'nothing'} is no identity that others follow from")
    return SaveChunks(
        tokens=tokens,
        identities=chain_pages(order.parent, tokens, page_size * TOKEN_BYTES),
        host_pages=pages_of(order.host_runs),
        device_pages=pages_of(order.device_runs),
        **_in_both_forms(order),
    )


def chunks_saved(message: ChunksSaved, ordered: bytes) -> bytes:
    """Return the chunks that an answer names as saved, 16 bytes each; ``ordered`` are all that were ordered."""
    return ordered if message.is_all else message.chunks


def _in_both_forms(order: SaveOrder) -> dict[str, Any]:
    return {name: getattr(order, name) for name in _SAVED_ALIKE}


def _is_worth_it(compact: bytes, plain: bytes) -> bool:
    return len(compact) + _NAME_BYTES < len(plain)


def _check_once(*plain: bytes) -> None:
    """Raise CodecError if a message has a field in both forms."""
    if any(plain):
        raise CodecError("a message says the same in a compact form and in its plain one")
