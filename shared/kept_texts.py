"""Texts that a worker keeps by order, so that later admissions need not repeat them. Pure.

The scheduler's mirror (:mod:`services.scheduler.core.kept_texts`) knows what is kept, because orders are executed in
sequence and each once. So there is no policy here and no bound: the scheduler keeps within ``kept_tokens`` of
``WorkerJoined``.
"""

from __future__ import annotations

import msgspec

from shared.compact_messages import whole_admission
from shared.ids import TOKEN_BYTES
from shared.messages.worker_plans import AdmitRequest

MOST_KEPT_TOKENS = 1 << 23
"""Tokens that a worker keeps: 64 prompts of 131,072 tokens, 32 MiB. A dropped text costs one admission in full."""

_PAGE_BYTES = 4


class KeptTexts:
    """The texts of one incarnation by number: tokens and page table of an admission, packed int32."""

    def __init__(self) -> None:
        """Begin with no texts."""
        self._texts: dict[int, tuple[bytes, bytes]] = {}

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._texts)

    @property
    def tokens(self) -> int:
        """Number of tokens of all texts together."""
        return sum(len(tokens) for tokens, _ in self._texts.values()) // TOKEN_BYTES

    def take(self, order: AdmitRequest) -> AdmitRequest | None:
        """Keep and drop texts as ``order`` says; return it with all its tokens and pages, and no ``base``.

        Returns None where the text that it refers to is not kept: then its own text is not kept, but texts are dropped.
        Raises CodecError, keeping and dropping nothing, where its compact form cannot be read.
        """
        order = whole_admission(order)
        whole = order if order.base is None else self._resolved(order)
        if whole is not None and order.text:
            self._texts[order.text] = (whole.tokens, whole.pages)
        for number in order.dropped:
            self._texts.pop(number, None)
        return whole

    def _resolved(self, order: AdmitRequest) -> AdmitRequest | None:
        base = order.base
        assert base is not None
        tokens, pages = self._texts.get(base.text, (b"", b""))
        token_bytes, page_bytes = base.tokens * TOKEN_BYTES, base.pages * _PAGE_BYTES
        if not 0 < token_bytes <= len(tokens) or not 0 <= page_bytes <= len(pages):
            return None
        # Joined without a copy of the part: a text of a million tokens is 4 MB.
        return msgspec.structs.replace(
            order,
            tokens=b"".join((memoryview(tokens)[:token_bytes], order.tokens)),
            pages=b"".join((memoryview(pages)[:page_bytes], order.pages)),
            base=None,
        )
