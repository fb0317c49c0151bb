"""What computing tells the saving of hidden states: which rows a pass computes, and what of them came to naught."""

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
        """Around one forward pass over the rows of ``work``, one behind the other."""

    def void(self) -> None:
        """Nothing of the step is right."""

    def drop(self, work: Iterable[Work]) -> None:
        """Drop the rows of these, which are not right."""


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
    """A step that saves the requests that ``name_of`` has a name for."""

    def __init__(
        self,
        step: SavingStep,
        name_of: Callable[[str], str | None],
        inputs: AttentionInputs | None,
        pool: DevicePool,
    ) -> None:
        self._step, self._name_of, self._inputs, self._pool = step, name_of, inputs, pool

    def around(self, work: Sequence[Work], meta: ForwardMeta) -> AbstractContextManager[None]:
        rows, first = [], 0
        for item in work:
            name = self._name_of(item.request.request_id)
            if name is not None:
                rows.append(SavedRows(name, first, item.rows, item.start))
            first += item.rows
        return self._step.around(rows, self._inputs, self._pool, meta.slots)

    def void(self) -> None:
        self._step.void()

    def drop(self, work: Iterable[Work]) -> None:
        names = (self._name_of(item.request.request_id) for item in work)
        self._step.drop(name for name in names if name is not None)
