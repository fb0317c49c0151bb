"""Orders about LoRA adapters, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``lora_path`` is a directory of every node that has workers. ``load_inplace`` replaces what has the name."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=128)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``lora_int_id`` is vLLM's own number, which clients may send along; it says nothing here."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=128)]
    lora_int_id: int | None = None
