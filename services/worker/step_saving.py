"""The interface between computing and saving of hidden states: which rows a pass computes, and which became void."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from services.worker.engine.forward_meta import ForwardMeta
from services.worker.kv.device_pool import DevicePool
from services.worker.restore.attention_inputs import AttentionInputs
from services.worker.restore.saving_step import SavedRows, SavingStep
from services.worker.steps import Work


class SavedStep(Protocol):
    """One step whose hidden states may be saved."""

    def around(self, work: Sequence[Work], meta: ForwardMeta) -> AbstractContextManager[None]:
        """Wrap one forward pass over the rows of ``work``, in that order, and take their hidden states."""

    def void(self) -> None:
        """Discard all that was taken in this step."""

    def drop(self, work: Iterable[Work]) -> None:
        """Discard the rows of this work, which are not right."""


class _NotSaved:
    """A step without saving."""

    def around(self, work: Sequence[Work], meta: ForwardMeta) -> AbstractContextManager[None]:
        return nullcontext()

    def void(self) -> None:
        pass

    def drop(self, work: Iterable[Work]) -> None:
        pass


NOT_SAVED: SavedStep = _NotSaved()


class StepSaving:
    """A step that saves the hidden states of some of its requests."""

    def __init__(
        self,
        step: SavingStep,
        name_of: Callable[[str], str | None],
        inputs: AttentionInputs | None,
        pool: DevicePool,
    ) -> None:
        """Save by ``step`` the requests for whose id ``name_of`` returns a sequence's name.

        ``inputs`` give hidden states, None where only KV is saved; KV is read from ``pool``.
        """
        self._step, self._name_of, self._inputs, self._pool = step, name_of, inputs, pool

    def around(self, work: Sequence[Work], meta: ForwardMeta) -> AbstractContextManager[None]:
        """Take the rows of the requests that have a name; the others are computed and not saved."""
        rows, first = [], 0
        for item in work:
            name = self._name_of(item.request.request_id)
            if name is not None:
                rows.append(SavedRows(name, first, item.rows, item.start))
            first += item.rows
        return self._step.around(rows, self._inputs, self._pool, meta.slots)

    def void(self) -> None:
        """Discard all that was taken; the step's KV may be wrong."""
        self._step.void()

    def drop(self, work: Iterable[Work]) -> None:
        """Discard the rows of this work; work that is not saved is ignored."""
        names = (self._name_of(item.request.request_id) for item in work)
        self._step.drop(name for name in names if name is not None)
