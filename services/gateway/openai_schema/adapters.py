"""Orders about LoRA adapters, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter to load.

    ``lora_path`` is a folder on every node with workers; ``load_inplace`` replaces an adapter of that name.
    """

    lora_name: Annotated[str, Meta(min_length=1, max_length=128)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter to unload. ``lora_int_id`` is vLLM's own number; it is accepted and ignored."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=128)]
    lora_int_id: int | None = None
