"""One rank's share of a checkpoint: a model of the share's size, filled with slices of the weight files.

No rank ever holds, or reads, what belongs to the others. Embeddings are whole in every rank. The head is divided by
rows of the vocabulary; one that is tied to the embeddings is whole in rank 0 and is not computed by the others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from services.worker.engine.attention import ATTENTION_NAME
from services.worker.engine.loading_progress import PHASE
from services.worker.engine.model_loading import check_forward
from services.worker.engine.text_parts import tensor_names, text_tensor_name
from services.worker.kv.device_pool import TORCH_DTYPES
from services.worker.parallel.collectives import Collectives
from services.worker.parallel.division import Share, check_divisible, config_of_rank, head_dim_of, kv_heads_of
from services.worker.parallel.plan import DivisionPlan
from services.worker.parallel.shared_linears import AbsentHead, JoinedHead, SummedLinear, replace_module
from shared import progress
from shared.errors import ConfigError, UnsupportedModel
from shared.model_files import load_config, weight_files
from shared.quantisation import quantisation

# Making an empty model patches torch's initialisers for as long as it takes.
_MAKING = threading.Lock()


def load_share(model_dir: Path, config: Any, share: Share, *, dtype: str, device: torch.device) -> Any:
    """The model with this rank's weights on ``device``, before :func:`connect`.

    Raises ConfigError for a number of ranks by which it does not divide, UnsupportedModel when it cannot be divided at
    all or weights are missing.
    """
    kind = dtype_of(config, dtype)
    check_divisible(config, share.ranks)
    method = quantisation(load_config(model_dir))
    if method is not None:
        raise UnsupportedModel(f"{model_dir} is quantised with {method}, and ranks read unquantised weights only")
    with _MAKING, no_init_weights():
        model = AutoModelForCausalLM.from_config(
            config_of_rank(config, share.ranks), dtype=kind, attn_implementation=ATTENTION_NAME
        )
    model.tie_weights()
    check_forward(model)
    plan = DivisionPlan(model)
    head = _head(model, config, share)
    with torch.no_grad(), ExitStack() as files:
        _Weights(model_dir, files).fill(model, config, share, plan, head)
    if (model_dir / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(model_dir, local_files_only=True)
    model.eval().requires_grad_(False)
    return model.to(device)


def dtype_of(config: Any, dtype: str) -> torch.dtype:
    """The type of weights and KV. Raises ConfigError where there is no such type, or ``auto`` does not say."""
    if dtype != "auto" and dtype not in TORCH_DTYPES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(TORCH_DTYPES)}, not {dtype!r}")
    kind = TORCH_DTYPES[dtype] if dtype != "auto" else getattr(config, "dtype", None)
    if not isinstance(kind, torch.dtype):
        raise ConfigError("--dtype auto: the checkpoint's configuration does not say which type it is; name one")
    return kind


def connect(model: Any, config: Any, share: Share, collectives: Collectives) -> None:
    """Put the collectives into ``model`` that :func:`load_share` has made of ``config``."""
    plan = DivisionPlan(model)
    for name in plan.divided(model, "rowwise"):
        replace_module(model, name, SummedLinear(model.get_submodule(name), collectives))
    name = _head_name(model)
    if _is_tied(model):
        if share.rank > 0:
            replace_module(model, name, AbsentHead())
    elif _divides_vocabulary(config, share):
        replace_module(model, name, JoinedHead(model.get_submodule(name), collectives))


def weight_bytes(model: Any) -> int:
    """Bytes of all parameters, tied ones counted once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _head(model: Any, config: Any, share: Share) -> str:
    """Divide the head if that is to be; returns its name then, else ""."""
    name = _head_name(model)
    if _is_tied(model) or not _divides_vocabulary(config, share):
        return ""
    whole = model.get_submodule(name)
    made = torch.nn.Linear(
        whole.in_features, config.vocab_size // share.ranks, bias=whole.bias is not None, dtype=whole.weight.dtype
    )
    replace_module(model, name, made)
    return name


def _head_name(model: Any) -> str:
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), None)
    if name is None or type(head) is not torch.nn.Linear:
        raise UnsupportedModel(f"{type(model).__name__} has no linear head")
    return name


def _is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _divides_vocabulary(config: Any, share: Share) -> bool:
    return int(config.vocab_size) % share.ranks == 0


class _Weights:
    """The tensors of a checkpoint by name, read slice by slice."""

    def __init__(self, model_dir: Path, files: ExitStack) -> None:
        """``files`` closes them. Raises UnsupportedModel for a checkpoint that is not in safetensors."""
        self._of: dict[str, tuple[Any, str]] = {}
        is_text_part = tensor_names(load_config(model_dir)) is not None
        for path in weight_files(model_dir):
            if path.suffix != ".safetensors":
                raise UnsupportedModel(f"{path.name}: ranks read their shares from safetensors only")
            try:
                opened = files.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise UnsupportedModel(f"{path} cannot be read: {error}") from error
            for name in opened.keys():  # noqa: SIM118 - it is no mapping.
                self._of[text_tensor_name(name) if is_text_part else name] = opened, name

    def fill(self, model: Any, config: Any, share: Share, plan: DivisionPlan, head: str) -> None:
        """Put this rank's slices into ``model``. Raises UnsupportedModel for what is missing or of another shape."""
        tensors = list(_tensors(model))
        missing = [name for name, _ in tensors if name not in self._of]
        if missing:
            raise UnsupportedModel(f"the checkpoint lacks weights: {', '.join(missing[:4])} ({len(missing)} in all)")
        with progress.phase(PHASE, total=len(tensors), unit="tensors") as advance:
            for name, tensor in tensors:
                self._fill_one(name, tensor, config, share, plan, head)
                advance(1)

    def _fill_one(
        self, name: str, tensor: torch.Tensor, config: Any, share: Share, plan: DivisionPlan, head: str
    ) -> None:
        module, _, kind = name.rpartition(".")
        style = "colwise" if head and module == head else plan.style(module)
        opened, stored_name = self._of[name]
        stored = opened.get_slice(stored_name)
        shape, mine = tuple(stored.get_shape()), tuple(tensor.shape)
        if style == "rowwise" and kind == "bias":
            # Outputs are summed, so one rank alone adds it.
            part = stored[:] if share.rank == 0 and shape == mine else torch.zeros(mine)
            fits = shape == mine
        elif style is None or len(shape) != len(mine):
            fits = shape == mine
            part = stored[:] if fits else None
        else:
            dim = 0 if style == "colwise" else 1
            rows = share.rows(shape[dim], mine[dim], kv_heads_of(config), head_dim_of(config))
            fits = rows is not None and shape[:dim] + shape[dim + 1 :] == mine[:dim] + mine[dim + 1 :]
            part = _slice(stored, dim, rows) if rows is not None and fits else None
        if not fits:
            raise UnsupportedModel(f"{name} has shape {shape}, and rank {share.rank} cannot have {mine} of it")
        tensor.copy_(part)


def _slice(stored: Any, dim: int, rows: range) -> torch.Tensor:
    part: torch.Tensor = stored[rows.start : rows.stop] if dim == 0 else stored[:, rows.start : rows.stop]
    return part


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, tied ones once, and the buffers that checkpoints hold."""
    yield from model.named_parameters()
    stored = model.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in stored)
