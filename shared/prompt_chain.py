"""Chain digests of prompts by blocks of 1,024 tokens: names by which a process refers to tokens that another holds.

A digest stands for its namespace and for every token from the first to the end of its block, as identities of pages do
(:mod:`shared.ids`); blocks are larger, so that a prompt of 131,072 tokens has 128 names, and do not depend on any page
size. It is cryptographic: tenants without a salt share a namespace, and no prompt of one may stand for another's.
"""

from __future__ import annotations

import hashlib

from shared.ids import DIGEST_BYTES, TOKEN_BYTES, chain_root

BLOCK_TOKENS = 1_024
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES

_PERSON = b"tc-block-1"


def block_digests(namespace: str, prompt: bytes, *, above: bytes = b"") -> bytes:
    """Return the digests (16 bytes each) of all whole blocks of ``prompt``, packed int32.

    With ``above``, the digest of some block of the namespace, ``prompt`` is the part behind that block.
    """
    previous = above or chain_root(namespace)
    blake2b = hashlib.blake2b
    digests = []
    for end in range(BLOCK_BYTES, len(prompt) + 1, BLOCK_BYTES):
        block = memoryview(prompt)[end - BLOCK_BYTES : end]
        previous = blake2b(block, key=previous, digest_size=DIGEST_BYTES, person=_PERSON).digest()
        digests.append(previous)
    return b"".join(digests)
