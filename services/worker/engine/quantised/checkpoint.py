"""A quantised checkpoint in the form of an unquantised one, for the library, and its layers' codes beside it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.worker.engine.quantised.codes import Codes, attach
from services.worker.engine.quantised.formats import (
    check_plain,
    dequantised,
    is_quantised,
    layer_of,
    name_of,
    none_quantised,
    read_layer,
    weight_name,
)
from shared.errors import UnsupportedModel
from shared.logs import get_logger
from shared.model_files import weight_files
from shared.quantisation import method_of, settings_of

_log = get_logger("worker.engine")


@dataclass(frozen=True, slots=True)
class Dequantised:
    """``weights`` by their names in the checkpoint, as if it were not quantised; ``codes`` by names of layers."""

    weights: dict[str, torch.Tensor]
    codes: dict[str, Codes]


def read_quantised(model_dir: Path, config: Mapping[str, Any], dtype: torch.dtype, *, keeps_codes: bool) -> Dequantised:
    """Read the weights of the checkpoint of this raw configuration, those of quantised layers in ``dtype``.

    Takes the memory of the whole model in ``dtype``, and of a byte a weight for codes where it ``keeps_codes``.
    Raises UnsupportedModel for formats that are not understood.
    """
    settings = settings_of(config) or {}
    method = method_of(settings).lower()
    found = Dequantised({}, {})
    quantised = 0
    for layer, tensors in _layers(model_dir, method):
        if not is_quantised(method, set(tensors)):
            for end, tensor in tensors.items():
                try:
                    check_plain(method, layer, end, tensor.dtype)
                except UnsupportedModel as error:
                    raise UnsupportedModel(f"{model_dir}: {error.message}") from error
                found.weights[name_of(method, layer, end)] = tensor
            continue
        quantised += 1
        bias = tensors.pop("bias", None)
        try:
            meaning = read_layer(method, settings, tensors)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{model_dir}: {layer}: {error.message}") from error
        found.weights[weight_name(method, layer)] = dequantised(meaning, dtype)
        if keeps_codes and isinstance(meaning, Codes):
            found.codes[layer] = meaning
        if bias is not None:
            found.weights[name_of(method, layer, "bias")] = bias
    if not quantised:
        raise none_quantised(model_dir, method)
    _log.info("weights_are_quantised", method=method, layers=quantised, dequantised_to=str(dtype))
    return found


def attach_codes(model: Any, codes: Mapping[str, Codes]) -> None:
    """Attach to each linear layer of ``model`` the codes that its weight was computed from."""
    linears = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    embedding = model.get_input_embeddings().weight
    for name, found in codes.items():
        # The library merges other layers, such as experts, and a tied head has the embedding's weight.
        if name in linears and linears[name].weight is not embedding:
            attach(linears[name], found)


def _layers(model_dir: Path, method: str) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield each module's tensors by the ends of their names, whichever files they lie in."""
    with ExitStack() as files:
        places: dict[str, dict[str, Any]] = defaultdict(dict)
        try:
            for path in weight_files(model_dir):
                file = files.enter_context(safe_open(path, framework="pt"))
                for name in file.keys():  # noqa: SIM118 - it is no mapping.
                    layer, end = layer_of(method, name)
                    places[layer][end] = file
            for layer, ends in places.items():
                yield layer, {end: file.get_tensor(name_of(method, layer, end)) for end, file in ends.items()}
        except (SafetensorError, OSError) as error:
            raise UnsupportedModel(f"{model_dir}: its weights cannot be read: {error}") from error
