"""Why hidden states cannot be used: of a model for good, or of one sequence this time. Callers fall back."""

from __future__ import annotations

from shared.errors import IntegrityError, UnsupportedModel


class HiddenStatesUnsupported(UnsupportedModel):
    """KV of this model does not follow from the input of its attention modules alone, or we cannot show that it does.
    The model serves all the same: its prefixes are loaded as KV or recomputed.
    """

    code = "hidden_states_unsupported"


class PiecesRefused(IntegrityError):
    """Stored hidden states are missing, torn, altered or of another shape. Restore by other means."""

    code = "hidden_states_refused"
