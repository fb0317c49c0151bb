"""A simulation's model of a language model: its published geometry."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.messages.pools import DTYPE_BYTES, FLOAT8, KvDtype, KvGeometry

Count = Annotated[int, Meta(ge=1)]


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer. Sliding windows are not modelled: every layer attends to all earlier tokens."""

    name: Annotated[str, Meta(min_length=1)]
    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    hidden: Count
    intermediate: Count
    vocabulary: Count
    parameters: Count  # Total, embeddings included.
    tied_embeddings: bool  # The output matrix is the embedding matrix.
    dtype: Literal["float32", "bfloat16", "float16"]
    kv_dtype: KvDtype = "auto"  # As in the setting of workers.

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one weight."""
        return DTYPE_BYTES[self.dtype]

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding; the output matrix has as many."""
        return self.vocabulary * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Parameters by which every row of a step is multiplied: all but the embeddings."""
        return self.parameters - self.embedding_parameters * (1 if self.tied_embeddings else 2)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, embeddings included."""
        return self.parameters * self.dtype_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's K and V in all layers."""
        return self.geometry(1).token_bytes

    def geometry(self, page_size: int) -> KvGeometry:
        """Return the geometry that workers of this model announce."""
        return KvGeometry(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=FLOAT8 if self.kv_dtype == "fp8" else self.dtype,
        )


def contradictions(profile: ModelProfile) -> list[str]:
    """Return the contradictions between fields that are each well-formed."""
    faults = []
    if profile.heads % profile.kv_heads:
        faults.append("kv_heads: must divide heads")
    if profile.layer_parameters <= 0:
        faults.append("parameters: must exceed those of the embeddings")
    return faults
