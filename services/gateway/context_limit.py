"""The longest request, and which of two bounds it meets: the model's context, or the size of a device pool."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import ContextTooLong

MIB = 2**20


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """Bounds on prompt and answer together, in tokens.

    ``pool_tokens`` is what the largest device pool holds; 0 where it is not known, or no smaller than the model's own
    context. ``page_bytes`` is 0 where it is not known.
    """

    model_tokens: int
    pool_tokens: int = 0
    page_size: int = 1
    page_bytes: int = 0

    @property
    def tokens(self) -> int:
        """The smaller of the two bounds."""
        return min(self.model_tokens, self.pool_tokens) if self.pool_tokens else self.model_tokens

    def refusal(self, needed: int, words: str, *, param: str) -> ContextTooLong:
        """Return the error for a request of ``needed`` tokens that does not fit.

        ``words`` say in OpenAI's phrases what it asks for; they are used where the model's own context is exceeded.
        """
        if needed > self.model_tokens or not self.pool_tokens:
            return ContextTooLong(
                f"This model's maximum context length is {self.model_tokens} tokens{words}", param=param
            )
        return ContextTooLong(
            f"The request needs {needed} tokens of KV, and the device pool of a worker holds {self.pool_tokens}; the "
            f"model itself takes {self.model_tokens}. Shorten the request, or start workers with "
            f"--device-kv-bytes {self.flag_value(needed)} or more.",
            param=param,
        )

    def flag_value(self, tokens: int) -> str:
        """Return the value of ``--device-kv-bytes`` for a pool that holds so many tokens."""
        return size_flag(tokens, self.page_size, self.page_bytes)


def size_flag(tokens: int, page_size: int, page_bytes: int) -> str:
    """Return the size of so many tokens in whole pages, rounded up to MiB, in the form that settings take."""
    pages = -(-tokens // page_size)
    return f"{max(1, -(-pages * page_bytes // MIB))}MiB"
