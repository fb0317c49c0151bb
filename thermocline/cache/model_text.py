"""The text of tokens, by the tokenizer of a model's directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from shared.errors import OperatorError


def text_reader(model: str) -> Callable[[Sequence[int]], str]:
    """Return what turns token ids into text. Raises OperatorError when the directory has no tokenizer."""
    if not Path(model).is_dir():
        raise OperatorError(f"--model {model}: there is no such folder")
    # Imported here: it takes a second that other uses of this command need not wait.
    from services.gateway.tokenizer import Tokenizer

    return Tokenizer(Path(model), threads=1).decode
