"""Token ids as text, by the tokenizer of a model's directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shared.errors import OperatorError


def text_reader(model: str) -> Callable[[Sequence[int]], str]:
    """Return a function from token ids to their text. Raises OperatorError without a folder or tokenizer."""
    if not Path(model).is_dir():
        raise OperatorError(f"--model {model}: there is no such folder")
    # Imported here, because it takes a second and most uses of the command do not need it.
    from services.gateway.tokenizer import Tokenizer

    try:
        return Tokenizer(Path(model), threads=1).decode
    except OperatorError as error:
        # The library's advice has several lines.
        raise OperatorError(f"--model {model}: {error.message.partition(chr(10))[0]}") from error
