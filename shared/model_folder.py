"""Checks of a model's name and the files of its folder before anything is loaded, without torch.

``--model`` names a folder, or a model of the Hugging Face hub that the hub's cache on this machine holds. Nothing is
downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigError, OperatorError, UnsupportedModel
from shared.model_files import (
    CONFIG_FILE,
    SENTENCEPIECE_FILES,
    TOKENIZER_FILES,
    WEIGHTS_FILE,
    WEIGHTS_INDEX,
    load_config,
    named_weights,
    weight_files,
)
from shared.quantisation import quantisation, quantisation_reasons
from shared.undecodable import UNDECODABLE

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

IS_ENCODER_DECODER = "it is an encoder-decoder model, and prompts go to a decoder here"

_NO_DECODER = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForImageClassification",
    "ForObjectDetection",
    "ForSemanticSegmentation",
    "ForDepthEstimation",
    "ForCTC",
    "ForAudioClassification",
)


def find_model(name: str) -> Path:
    """Return the folder that ``--model`` names: a path, or the snapshot of a hub id in the hub's cache.

    Raises ConfigError where there is neither; its message tells how to get the model.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(f"--model {name}: there is no such folder")
    snapshot = _cached_snapshot(name)
    if snapshot is None:
        raise ConfigError(
            f"--model {name}: there is no such folder, and the Hugging Face cache of this machine has no model of that "
            f"name. Fetch it with: hf download {name} --local-dir DIR, then name the folder: --model DIR"
        )
    return snapshot


def check_model(directory: Path) -> dict[str, Any]:
    """Return the raw configuration of the model in ``directory``.

    Raises OperatorError for a folder without a readable ``config.json``, UnsupportedModel with every reason why the
    model cannot be served.
    """
    if not (directory / CONFIG_FILE).is_file():
        raise _without_config(directory)
    config = load_config(directory)
    reasons = [*config_reasons(config), *_file_reasons(directory, config)]
    if reasons:
        raise UnsupportedModel(f"{directory} cannot be served: {'; '.join(reasons)}")
    return config


def config_reasons(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons in a raw configuration why its model cannot be served."""
    yield from quantisation_reasons(config)
    if config.get("is_encoder_decoder") is True:
        yield IS_ENCODER_DECODER
    architectures = config.get("architectures")
    named = [str(each) for each in architectures] if isinstance(architectures, list) else []
    heads = sorted({head for name in named for head in _NO_DECODER if name.endswith(head)})
    if heads and len(heads) == len(set(named)):
        yield f"it is {', '.join(named)}, which answers with no text"


def _file_reasons(directory: Path, config: Mapping[str, Any]) -> Iterator[str]:
    try:
        weight_files(directory)
        # Quantised ones are not read by the library.
        if not named_weights(directory) and quantisation(config) is None:
            yield f"its weights are neither in {WEIGHTS_FILE} nor named by {WEIGHTS_INDEX}"
    except OperatorError as error:
        yield error.message if not any(directory.glob("*.gguf")) else _GGUF
    tokenizers = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not tokenizers:
        yield f"it has no tokenizer ({', '.join(TOKENIZER_FILES)})"
    elif all(map(_is_sentencepiece, tokenizers)) and find_spec("sentencepiece") is None:
        yield "its tokenizer is SentencePiece's: pip install sentencepiece, or save a tokenizer.json"
    tokenizer = directory / TOKENIZER_FILES[0]
    try:
        if tokenizer.is_file():
            msgspec.json.decode(tokenizer.read_bytes(), type=dict[str, msgspec.Raw])
    except (OSError, *UNDECODABLE) as error:
        yield f"its {tokenizer.name} cannot be read: {error}"


def _is_sentencepiece(tokenizer: Path) -> bool:
    """Return whether the file is a model of SentencePiece: a protobuf message, which begins with its first field."""
    with suppress(OSError), tokenizer.open("rb") as file:
        return tokenizer.name in SENTENCEPIECE_FILES and file.read(1) == b"\n"
    return False


_GGUF = "its weights are quantised with GGUF, which is not served yet: take the checkpoint in safetensors"


def _without_config(directory: Path) -> OperatorError:
    if directory.suffix == ".gguf" or any(directory.glob("*.gguf")):
        return UnsupportedModel(f"{directory} cannot be served: {_GGUF}")
    if not directory.is_dir():
        return ConfigError(f"{directory} is not the folder of a model: it is no folder")
    return ConfigError(f"{directory} is not the folder of a model: it has no {CONFIG_FILE}")


def _cached_snapshot(name: str) -> Path | None:
    """Return the snapshot of ``name`` in the hub's cache on this machine (HF_HOME, HF_HUB_CACHE), or None."""
    # Imported here because it takes a third of a second, and folders are the common case.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
