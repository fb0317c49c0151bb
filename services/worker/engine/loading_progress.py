"""The progress of transformers in loading a checkpoint, by the library's hook for progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers.utils import logging as transformers_logging

from shared import progress

PHASE = "loading weights"


class _Bar:
    """The iterable that transformers gets in place of a progress bar. Each of its steps is a tensor."""

    def __init__(self, items: Iterable[Any], advance: Callable[[int], None]) -> None:
        self._items = items
        self._advance = advance

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self._advance(1)

    def update(self, amount: int = 1) -> None:
        self._advance(amount)

    def __getattr__(self, name: str) -> Callable[..., None]:
        # Captions and colours of a hidden bar.
        return lambda *_, **__: None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@contextmanager
def told_progress() -> Iterator[None]:
    """Report what transformers loads during the block as progress phases.

    One block at a time: the hook is a global variable of the library.
    """
    with ExitStack() as phases:

        def hook(factory: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> _Bar:
            items = arguments[0] if arguments else named.get("iterable", ())
            total = named.get("total") or (len(items) if hasattr(items, "__len__") else 0)
            return _Bar(items, phases.enter_context(progress.phase(PHASE, total=total, unit="tensors")))

        earlier = transformers_logging.set_tqdm_hook(hook)
        try:
            yield
        finally:
            transformers_logging.set_tqdm_hook(earlier)
