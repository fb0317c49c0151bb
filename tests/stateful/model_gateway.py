"""A model gateway: keeps what its requests were told."""

from __future__ import annotations

from collections import deque

from shared.messages import gateway_notices, requests


class ModelGateway:
    """Keeps what its requests were told, and answers ResumeNeeded and PromptWanted."""

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.open: dict[str, requests.SubmitRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.attempts: dict[str, int] = {}
        self.ended: dict[str, str] = {}  # "finished" or an error code.
        self.resumes: deque[gateway_notices.ResumeNeeded] = deque()
        self.wanted: deque[gateway_notices.PromptWanted] = deque()
        self.last_notice = 0

    def take_token(self, request_id: str, attempt: int, index: int, token: int) -> None:
        """A token from a worker; repeats are dropped, gaps and changes are faults."""
        if request_id in self.ended or attempt < self.attempts[request_id]:
            return
        self.attempts[request_id] = attempt
        tokens = self.tokens[request_id]
        assert index <= len(tokens), "a gap in the tokens"
        if index == len(tokens):
            tokens.append(token)
        assert tokens[index] == token, "a token changed"

    def take_end(self, request_id: str, attempt: int) -> None:
        if request_id in self.open and attempt >= self.attempts[request_id]:
            self.ended.setdefault(request_id, "finished")
            self.open.pop(request_id, None)

    def receive(self, notice: gateway_notices.GatewayNotice) -> None:
        assert notice.number == self.last_notice + 1, "a notice is missing"
        self.last_notice = notice.number
        word = notice.word
        if isinstance(word, gateway_notices.RequestFailed):
            if word.request_id in self.open:
                self.ended[word.request_id] = word.code
                del self.open[word.request_id]
        elif isinstance(word, gateway_notices.PromptWanted):
            self.wanted.append(word)
        else:
            self.resumes.append(word)
