"""One prefix, and one request, as the default policy remembers them."""

from __future__ import annotations

import msgspec


class Context(msgspec.Struct, array_like=True, gc=False):
    """A request, as far as the prefixes that it used last share it. Sizes in tokens, times in policy seconds."""

    last: float  # When it was admitted.
    prompt: int
    known: int = 0  # Of its prompt, how much had been seen before, resident or not.
    turn: int = 0  # How many requests extended one another to come to this one.
    pace: float = -1.0  # Smoothed time between uses of the deepest known prefix; -1 when it was not known.
    branches: int = 0  # Known continuations of the deepest known prefix, this one among them.
    users: int = 0  # Records that refer to it.
    answer: int = -1  # Tokens that were sampled for it; -1 as long as that is not known.


class Record(msgspec.Struct, array_like=True, gc=False):
    """One prefix that ends where a node ends, or ended."""

    digest: int
    end: int  # Depth of its end, in tokens.
    context: int = -1  # Number of the request that used it last; -1 is none yet.
    count: int = 1
    turn: int = 0
    pace: float = -1.0
    children: int = 0  # Continuations ever seen.
    latest: int = 0  # Digest of the one that was used last; 0 is none.
    passed: int = 0  # Since its last use a request took another branch: 0 no, else by the number of branches.
    sample: int = -1
