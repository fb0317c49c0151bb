"""Reasons why hidden states cannot be used: of a model permanently, or of one sequence this time. Callers fall back."""

from __future__ import annotations

from shared.errors import IntegrityError, UnsupportedModel


class HiddenStatesUnsupported(UnsupportedModel):
    """A model whose KV does not follow from the inputs of its attention modules alone, or not provably.

    The model serves all the same: its prefixes are loaded as KV or recomputed.
    """

    code = "hidden_states_unsupported"


class PiecesRefused(IntegrityError):
    """Stored hidden states are missing, torn, altered or of another shape. Restore by other means."""

    code = "hidden_states_refused"
