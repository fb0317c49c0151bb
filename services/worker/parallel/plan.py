"""Which modules of a model are divided, and how: as the model's own tensor-parallel plan in Hugging Face says.

The plan names modules by patterns. ``colwise``: a rank has some output rows of the weight. ``rowwise``: it has some
input columns, and outputs are summed. A module without an entry is whole in every rank. Other styles join what was
divided in the middle of a layer, which needs collectives of their own: models that have them are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from shared.errors import UnsupportedModel

Style = Literal["colwise", "rowwise"]

_WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise")
"""Styles of what is whole in every rank here. Embeddings are only read, a row a token: dividing them saves memory, and
costs a sum over ranks in every step.
"""


class DivisionPlan:
    """The plan of one model."""

    def __init__(self, model: Any) -> None:
        """Raises UnsupportedModel when the model has none, or one with styles that are not served."""
        name = type(model).__name__
        declared: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
        if not declared:
            raise UnsupportedModel(f"{name} does not say how it divides among ranks")
        odd = [
            f"{pattern} ({style})"
            for pattern, style in declared.items()
            if style not in ("colwise", "rowwise", *_WHOLE)
        ]
        if odd:
            raise UnsupportedModel(f"{name} has modules that are not divided among ranks here: {', '.join(odd)}")
        prefix = model.base_model_prefix
        self._patterns: list[tuple[re.Pattern[str], Style]] = [
            (_pattern(f"{prefix}.{pattern}"), "colwise" if style == "colwise" else "rowwise")
            for pattern, style in declared.items()
            if style not in _WHOLE
        ]

    def style(self, module: str) -> Style | None:
        """How the module of this name is divided; None if it is whole."""
        return next((style for pattern, style in self._patterns if pattern.fullmatch(module)), None)

    def divided(self, model: Any, style: Style) -> Iterator[str]:
        """Names of the modules of ``model`` that are divided in this way."""
        return (name for name, _ in list(model.named_modules()) if self.style(name) == style)


def _pattern(declared: str) -> re.Pattern[str]:
    """``*`` stands for one component of a name."""
    return re.compile(re.escape(declared).replace(r"\*", r"[^.]+"))
