"""What model processes keep instead of tensors, and the model that they all agree on.

A page of a device or host pool holds the identity of the page before it and its own tokens, which is all that its
KV depends on; so every read of a wrong, stale or half-written page is seen, and raises :class:`WrongKv`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache

from shared.ids import chain_page, namespace_digest
from shared.messages import requests
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.pools import KvGeometry

EOS = 0
VOCABULARY = 11
MODEL = "model-1"


class WrongKv(AssertionError):
    """Something read KV that is not what its identity says."""


def namespace(salt: str = "", adapter: str = "") -> str:
    """A namespace of the model."""
    return namespace_digest(MODEL, adapter=adapter, salt=salt)


def geometry(page_size: int) -> KvGeometry:
    """The geometry of every pool of a model cell."""
    return KvGeometry(layers=1, kv_heads=1, head_dim=1, page_size=page_size, dtype="float32")


def next_token(seed: int, tokens: list[int]) -> int:
    """What the model samples after ``tokens``: a pure function, so that a resumed request goes on alike."""
    digest = hashlib.blake2b(pack_int32([seed, *tokens]), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def expected_output(submit: requests.SubmitRequest) -> list[int]:
    """All tokens that a request must get, whatever happens on the way."""
    tokens = unpack_int32(submit.prompt)
    output: list[int] = []
    while len(output) < submit.sampling.max_tokens:
        if output and output[-1] == EOS and not submit.sampling.ignore_eos:
            break
        output.append(next_token(submit.sampling.seed, tokens + output))
    return output


@lru_cache(maxsize=10_000)
def _identity(before: bytes, tokens: tuple[int, ...]) -> bytes:
    """Each page is asked again with every token that is read behind it."""
    return chain_page(before, pack_int32(tokens))


@dataclass
class Page:
    """KV of one page: the identity of everything before it, and the tokens so far."""

    before: bytes
    tokens: list[int]
    is_corrupt: bool = False

    def identity(self) -> bytes:
        return _identity(self.before, tuple(self.tokens))


@dataclass
class HostPool:
    """A storage's pool, and the storage that made it."""

    storage_id: str
    incarnation: str
    pages: int
    memory: dict[int, Page] = field(default_factory=dict)
