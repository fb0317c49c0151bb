"""The whole prompts of a recording, whose requests may name the front of theirs by a digest (the base)."""

from __future__ import annotations

import msgspec

from services.scheduler.core import CellState
from services.scheduler.core.cache.prompt_blocks import find_base, prompt_behind
from shared.compact_messages import whole_request
from shared.errors import CodecError
from shared.ids import DIGEST_BYTES, TOKEN_BYTES
from shared.messages.requests import SubmitRequest
from shared.prompt_chain import block_digests


class RecordedPrompts:
    """Prompts and answers so far, by the digests of their blocks, and the tree at the beginning of the recording.

    The scheduler resolved a base from its tree, which other settings would fill differently; but all that the tree ever
    held was in an earlier prompt or answer.
    """

    def __init__(self) -> None:
        """Begin with no prompts; :meth:`begin` adds those of the recording's first state."""
        self._held: dict[bytes, bytes] = {}  # By digest of a block: packed tokens, from the start to its end at least.
        self._state: CellState | None = None
        self._asked: dict[str, SubmitRequest] = {}

    def begin(self, state: CellState) -> None:
        """Take over the state at the beginning of the recording."""
        self._state = state
        for request in state.requests.values():
            self._note(request.submit)

    def whole(self, message: SubmitRequest) -> SubmitRequest | None:
        """Return the request with its whole prompt; None where its base is not known, or it is invalid.

        The scheduler then asked for the whole prompt, and the same request follows with it.
        """
        try:
            message = whole_request(message)
        except CodecError:
            return None  # The scheduler refused it.
        if message.base is not None:
            front = self._front(message)
            if front is None:
                return None
            message = msgspec.structs.replace(message, prompt=front + message.tail, base=None, tail=b"")
        self._note(message)
        return message

    def answered(self, request_id: str, output: bytes) -> None:
        """Record the answer of a request, as packed tokens."""
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            self._hold(asked.namespace, asked.prompt + output)

    def _front(self, message: SubmitRequest) -> bytes | None:
        base, state = message.base, self._state
        assert base is not None
        held = self._held.get(base.digest)
        if held is not None:
            return held[: base.tokens * TOKEN_BYTES]
        node = None if state is None else find_base(state.blocks, state.tree, message.namespace, base)
        return None if state is None or node is None else prompt_behind(state.tree, node, base.tokens, b"")

    def _note(self, request: SubmitRequest) -> None:
        self._asked[request.request_id] = request
        self._hold(request.namespace, request.prompt)

    def _hold(self, namespace: str, tokens: bytes) -> None:
        digests = block_digests(namespace, tokens)
        for number in range(len(digests) // DIGEST_BYTES):
            digest = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            self._held.setdefault(digest, tokens)
