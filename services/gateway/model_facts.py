"""Facts about the served model that the gateway needs; read once, at the start."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.gateway.library_defaults import library_defaults
from shared import model_files
from shared.errors import UnsupportedModel
from shared.logs import get_logger
from shared.messages.pools import KvDtype
from shared.messages.worker_events import KernelFacts
from shared.model_context import named_in
from shared.model_folder import check_model

_log = get_logger("gateway")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters for requests without their own: OpenAI's, unless generation_config.json differs."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    suppressed: tuple[int, ...] = ()  # Tokens that no answer has, whatever a request asks for.


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model's name in the API, its identity in namespaces, and bounds on token ids and contexts."""

    name: str
    fingerprint: str
    """Digest of everything that KV depends on."""
    vocab_size: int  # Token ids are in [0, vocab_size).
    max_context: int  # Prompt and answer together, tokens.
    defaults: SamplingDefaults = SamplingDefaults()
    created: int = 0  # Unix seconds, for /v1/models.
    eos_token_ids: tuple[int, ...] = ()
    answer_fingerprint: str = ""
    """Digest of everything that answers depend on: also the chat template and the sampling defaults."""
    unserved: tuple[str, ...] = ()
    """Fields of generation_config.json that would change answers and are not applied."""
    kernels: KernelFacts | None = None
    """The kernels that are part of ``fingerprint``."""


def read_model_facts(
    model_dir: Path,
    *,
    served_name: str = "",
    max_context_tokens: int = 0,
    cache_dir: Path | None = None,
    is_exact: bool = False,
    kv_dtype: KvDtype = "auto",
) -> ModelFacts:
    """Read the model's folder. Raises OperatorError when it is incomplete, UnsupportedModel when sizes are missing."""
    vocab_size, max_context = check_facts(model_dir, max_context_tokens)
    if max_context < max_context_tokens:
        _log.warning("context_is_the_models", asked_tokens=max_context_tokens, context_tokens=max_context)
    generation_config = model_files.load_generation_config(model_dir)
    found = model_files.fingerprints(
        model_dir, cache_dir, context_tokens=max_context_tokens, is_exact=is_exact, kv_dtype=kv_dtype
    )
    return ModelFacts(
        name=served_name or model_files.model_name(model_dir),
        fingerprint=found.model,
        kernels=found.kernels,
        answer_fingerprint=model_files.answer_fingerprint(model_dir, found.model),
        vocab_size=vocab_size,
        max_context=max_context,
        defaults=sampling_defaults(generation_config, vocab_size),
        unserved=unserved_fields(generation_config),
        created=int(time.time()),
        eos_token_ids=eos_token_ids(model_dir),
    )


def check_facts(model_dir: Path, max_context_tokens: int = 0) -> tuple[int, int]:
    """Return the vocabulary size and the longest context, reading no weights. Raises as :func:`read_model_facts`."""
    config = check_model(model_dir)
    text = config.get("text_config")
    merged = {**config, **(text if isinstance(text, dict) else {})}
    if isinstance(text, dict) and not {"vocab_size", "max_position_embeddings"} <= merged.keys():
        merged = {**library_defaults(model_dir), **merged}
    vocab_size = merged.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise UnsupportedModel(f"{model_dir}: config.json names no vocab_size")
    own_context = named_in(merged)
    max_context = min(max_context_tokens or own_context, own_context or max_context_tokens)
    if max_context < 1:
        raise UnsupportedModel(f"{model_dir}: config.json names no context length; set --max-context-tokens")
    return vocab_size, max_context


def eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Return the sorted tokens that end an answer: generation_config.json's, else config.json's, as for workers."""
    config = model_files.load_config(model_dir)
    text = config.get("text_config")
    merged = {**config, **(text if isinstance(text, dict) else {})}
    for given in (model_files.load_generation_config(model_dir), merged):
        found = given.get("eos_token_id")
        if found is not None:
            return tuple(sorted(found)) if isinstance(found, list) else (int(found),)
    return ()


def sampling_defaults(generation_config: Mapping[str, Any], vocab_size: int) -> SamplingDefaults:
    """Return the defaults of a generation_config.json; values that are no numbers are left out.

    Suppressed are ``suppress_tokens`` and ``bad_words_ids`` of one token, as far as they are in the vocabulary.
    """
    given = {
        name: generation_config[name]
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        if isinstance(generation_config.get(name), int | float) and not isinstance(generation_config[name], bool)
    }
    if "top_k" in given:
        given["top_k"] = int(given["top_k"])
    tokens = {*_numbers(generation_config.get("suppress_tokens"))}
    tokens |= {word[0] for word in _bad_words(generation_config) if len(word) == 1}
    return SamplingDefaults(**given, suppressed=tuple(sorted(token for token in tokens if 0 <= token < vocab_size)))


_UNSERVED = {
    "begin_suppress_tokens": [],
    "no_repeat_ngram_size": 0,
    "sequence_bias": {},
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
}
"""Fields of the library with which its answers are others, and values that change nothing; nor does null."""


def unserved_fields(generation_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields with which the library would give other answers than a cell does."""
    found = [name for name, none in _UNSERVED.items() if generation_config.get(name) not in (None, none)]
    if any(len(word) > 1 for word in _bad_words(generation_config)):
        found.append("bad_words_ids of several tokens")
    return tuple(found)


def _bad_words(generation_config: Mapping[str, Any]) -> list[list[int]]:
    given = generation_config.get("bad_words_ids")
    return [_numbers(word) for word in given] if isinstance(given, list) else []


def _numbers(given: object) -> list[int]:
    return [each for each in given if isinstance(each, int)] if isinstance(given, list) else []
