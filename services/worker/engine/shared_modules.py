"""Layer numbers for modules that several layers share.

Zamba's attention layers have one set of weights. Each call names its layer, and the library's attention functions are
given the module without it; so the number is set on the module before.
"""

from __future__ import annotations

import inspect
from typing import Any


def name_layers(model: Any) -> None:
    """Set the number of the calling layer on attention modules of ``model`` that are called with one."""
    for module in model.modules():
        signature = inspect.signature(module.forward)
        if hasattr(module, "is_causal") and "layer_idx" in signature.parameters:
            module.register_forward_pre_hook(_noting(signature), with_kwargs=True)


def _noting(signature: inspect.Signature) -> Any:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module.layer_idx = signature.bind(*args, **kwargs).arguments["layer_idx"]

    return hook
