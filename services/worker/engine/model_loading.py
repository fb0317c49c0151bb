"""Loading a directory of a Hugging Face checkpoint, refusing models that cannot be served exactly.

Models that the configuration alone rules out are refused here, before any weight is read; those that only running them
rules out are in :mod:`services.worker.engine.probe`.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from services.worker.engine.attention import ATTENTION_NAME
from services.worker.engine.chunks import CHUNKED, expected_chunks, tell_chunks
from services.worker.engine.compressed import COMPRESSED_TYPES
from services.worker.engine.latents import keep_latents
from services.worker.engine.loading_progress import PHASE, told_progress
from services.worker.engine.model_faults import in_one_line, refusing
from services.worker.engine.pinned_rotations import pin_rotations
from services.worker.engine.quantised.checkpoint import attach_codes, read_quantised
from services.worker.engine.shared_modules import name_layers
from services.worker.engine.states.accesses import own_layer_types
from services.worker.engine.states.layers import STATE_LAYER_TYPES
from services.worker.engine.text_parts import convert_as_whole, tensor_names, text_part, text_tensor_name
from services.worker.engine.told_positions import tell_positions
from services.worker.kv.device_pool import TORCH_DTYPES
from shared import progress
from shared.errors import ConfigError, OperatorError, UnsupportedModel
from shared.logs import get_logger
from shared.model_context import named_context
from shared.model_files import CONFIG_FILE, GENERATION_CONFIG_FILE, weight_files
from shared.model_files import load_config as load_raw_config
from shared.model_folder import IS_ENCODER_DECODER, config_reasons
from shared.quantisation import quantisation

_log = get_logger("worker.engine")

# The loader patches torch's initialisers while it runs: two at once in one process leave tied weights untied.
_LOADING = threading.Lock()

LAYER_TYPES = (
    *("full_attention", "sliding_attention", "indexed_attention", "minimax_m3_sparse", CHUNKED, "mlp", "moe"),
    *COMPRESSED_TYPES,
    *STATE_LAYER_TYPES,
)


def load_config(model_dir: Path) -> Any:
    """Load the checkpoint's configuration, or that of its text part.

    Raises UnsupportedModel, with every reason that the configuration shows.
    """
    unreadable = f"{model_dir} holds no readable model configuration"
    try:
        raw = load_raw_config(model_dir)
    except OperatorError as error:
        raise UnsupportedModel(f"{unreadable}: {error.message}") from error
    model_type = str(raw.get("model_type", "a model without a type"))
    reasons = list(config_reasons(raw))
    named = raw.get("auto_map")
    own_code = named if isinstance(named, dict) else {}
    if not reasons:
        with refusing(model_type, "configured"):
            try:
                config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
            except (OSError, ValueError, KeyError) as error:
                if "AutoConfig" in own_code:
                    reason = f"its model is code in the folder ({own_code['AutoConfig']}), which is not run here"
                    raise UnsupportedModel(f"{model_type} cannot be served: {reason}") from error
                raise UnsupportedModel(f"{unreadable}: {in_one_line(error)}") from error
            text = text_part(config)
            convert_as_whole(text)
            if isinstance(raw.get("text_config"), dict):
                # Beside the text part, as the gateway takes them.
                text.eos_token_id = raw["text_config"].get("eos_token_id", raw.get("eos_token_id", text.eos_token_id))
            layer_types = own_layer_types(text)
            if layer_types is not None:
                text.layer_types = layer_types
            reasons += (*_reasons_against(text), *_reasons_against_code(own_code))
            if hasattr(text, "quantization_config"):
                # Otherwise the library would load such weights its own way.
                del text.quantization_config
    if reasons:
        raise UnsupportedModel(f"{model_type} cannot be served exactly: {'; '.join(reasons)}")
    return text


def load_model(
    model_dir: Path,
    config: Any,
    *,
    dtype: str,
    device: str,
    context: int = 0,
    attention: str = ATTENTION_NAME,
    keeps_codes: bool = False,
) -> Any:
    """Load the model with its weights on ``device``, ready for inference with this implementation of attention.

    Weights are in ``dtype`` ("auto" is the checkpoint's own), and ``context`` positions can be served (0: those that
    the model knows). Quantised weights are dequantised; ``keeps_codes`` leaves their codes with the layers
    (:mod:`~services.worker.engine.quantised.codes`).

    Raises UnsupportedModel when weights are missing or of the wrong shape: Hugging Face fills those with random
    numbers, which must not produce answers.
    """
    if dtype != "auto" and dtype not in TORCH_DTYPES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(TORCH_DTYPES)}, not {dtype!r}")
    transformers_logging.disable_progress_bar()
    with refusing(config.model_type, "loaded"):
        with _LOADING, progress.phase(PHASE), told_progress():
            model, report = _load(model_dir, config, dtype, attention, keeps_codes=keeps_codes)
        _check_report(model_dir, report)
        _tell_unused(report)
        check_forward(model)
        tell(model, config, max_context_tokens(config, context))
        keep_latents(model)
        name_layers(model)
        model.eval().requires_grad_(False)
        if device == "cpu":
            return model
        with progress.phase(f"moving the weights to {device}"):
            model.to(torch.device(device))
        return model


def _check_report(model_dir: Path, report: dict[str, Any]) -> None:
    """Raise UnsupportedModel for weights that the library has filled with random numbers."""
    missing = sorted(map(str, report["missing_keys"]))
    if missing:
        raise UnsupportedModel(f"{model_dir} lacks weights: {', '.join(missing[:4])} ({len(missing)} in all)")
    others = [f"{name} is {_dims(found)}, not {_dims(own)}" for name, found, own in sorted(report["mismatched_keys"])]
    if others:
        raise UnsupportedModel(
            f"{model_dir} has weights of other shapes than its configuration: {', '.join(others[:4])} "
            f"({len(others)} in all)"
        )


def _tell_unused(report: dict[str, Any]) -> None:
    """Log the weights that the model has no place for: those of parts that are not served, or a mistake."""
    unused = sorted(map(str, report["unexpected_keys"]))
    if unused:
        _log.info("weights_unused", count=len(unused), first=unused[:4])


def _dims(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def tell(model: Any, config: Any, context: int) -> None:
    """Set on modules of ``model`` what its configuration says of positions, chunks and ``context``, in tokens."""
    pin_rotations(model, context)
    tell_chunks(model, expected_chunks(config))
    tell_positions(model)


def _load(model_dir: Path, config: Any, dtype: str, attention: str, *, keeps_codes: bool) -> tuple[Any, dict[str, Any]]:
    """Return the model, and the library's report of what it loaded."""
    raw = load_raw_config(model_dir)
    names = tensor_names(raw)
    arguments = {
        "config": config,
        "attn_implementation": attention,
        "local_files_only": True,
        "trust_remote_code": False,
        "output_loading_info": True,
        "key_mapping": names,
        "ignore_mismatched_sizes": True,  # It reports them, rather than raise an error without their names.
    }
    if quantisation(raw) is None:
        _check_files(model_dir)
        model, report = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=TORCH_DTYPES.get(dtype, "auto"),
            use_safetensors=True,  # A pickle runs whatever its author wrote.
            # With PEFT installed the library adds an adapter to the weights that it finds in the folder, and no
            # digest covers that. It finds none within a file.
            adapter_kwargs={"subfolder": CONFIG_FILE},
            **arguments,
        )
        return model, report
    kind = TORCH_DTYPES.get(dtype) or getattr(config, "dtype", None) or torch.bfloat16
    read = read_quantised(model_dir, raw, kind, keeps_codes=keeps_codes)
    model, report = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, dtype=kind, state_dict=read.weights, **arguments
    )
    if (model_dir / GENERATION_CONFIG_FILE).is_file():
        model.generation_config = GenerationConfig.from_pretrained(model_dir, local_files_only=True)
    codes = read.codes
    if names:
        codes = {text_tensor_name(f"{name}.weight").removesuffix(".weight"): each for name, each in codes.items()}
    attach_codes(model, codes)
    return model, report


def _check_files(model_dir: Path) -> None:
    """Raise UnsupportedModel, with its name, for a file of weights that is not whole: the library names none."""
    for path in weight_files(model_dir):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise UnsupportedModel(f"{path} cannot be read: {error}") from error


def check_forward(model: Any) -> None:
    """Raise UnsupportedModel unless ``model`` can be asked for the logits of chosen rows."""
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"{type(model).__name__} cannot compute logits for chosen rows only")


def expected_windows(config: Any) -> list[int | None]:
    """Return the sliding window of each layer as the configuration has it; None is full attention."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * int(config.num_hidden_layers)
    return [window if kind in ("sliding_attention", "hybrid_sliding") else None for kind in kinds]


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """Return the tokens that end an answer: those of the generation config, else those of the model's; sorted."""
    for config in (model.generation_config, model.config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return tuple(sorted(found)) if isinstance(found, list | tuple) else (int(found),)
    return ()


def own_context(config: Any) -> int:
    """Return the positions that the model knows; 0 where its configuration names none."""
    return named_context(lambda field: getattr(config, field, None))


def max_context_tokens(config: Any, bound: int = 0) -> int:
    """Return the positions that the model knows, or ``bound`` where that is less; 0 is no bound.

    Raises ConfigError where a prompt and an answer cannot both have a token, and where neither names a number.
    """
    own = own_context(config)
    if not own and not bound:
        raise ConfigError(
            f"the configuration of {config.model_type} names no longest context: name it with --max-context-tokens"
        )
    context = min(own or bound, bound or own)
    if context < 2:
        raise ConfigError(f"a context of {context} token holds no prompt with an answer: at least 2 are needed")
    return context


def _reasons_against(config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield IS_ENCODER_DECODER
    # "vision" concerns images alone, which are not served.
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        yield "its attention is not causal"
    odd_kinds = sorted(_rope_kinds(config) - {"default", "ntk_alpha", *ROPE_INIT_FUNCTIONS})
    if odd_kinds:
        yield f"its rotary embeddings are of kind {', '.join(odd_kinds)}, which the library does not know"
    odd_layers = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES))
    if odd_layers:
        yield f"it has layers of type {', '.join(odd_layers)}"


def _rope_kinds(config: Any) -> set[str]:
    """Return the kinds of rotary embeddings: one, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None)
    each = [rope, *rope.values()] if isinstance(rope, dict) else []
    return {str(one["rope_type"]) for one in each if isinstance(one, dict) and "rope_type" in one}


def _reasons_against_code(own_code: Mapping[str, Any]) -> Iterator[str]:
    """Yield a reason where classes in the folder, by the library's name for their kind, are none that it has, too."""
    for kind in ("AutoModelForCausalLM", "AutoModelForImageTextToText"):
        name = str(own_code.get(kind, "")).rpartition(".")[2]
        if name and name.lower() not in _library_classes():
            yield f"its model is code in the folder ({own_code[kind]}), which is not run here"


@functools.cache
def _library_classes() -> frozenset[str]:
    """Return the names of the library's classes that answer prompts, in lower case: some spell theirs otherwise."""
    return frozenset(
        name.lower()
        for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
        for names in mapping.values()
        for name in ((names,) if isinstance(names, str) else names)
    )


def model_bytes_of(model: Any) -> int:
    """Return the bytes of all weights of a loaded model, tied ones once."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())
