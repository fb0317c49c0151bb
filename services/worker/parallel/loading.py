"""One rank's share of a checkpoint: a model of the share's size, filled with slices of the weight files.

No rank holds or reads the other ranks' shares. Embeddings are whole in every rank. The head is divided by rows of the
vocabulary; one that is tied to the embeddings is whole in rank 0 and is not computed by the others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from services.worker.engine.attention import ATTENTION_NAME
from services.worker.engine.compressed import COMPRESSED_TYPES
from services.worker.engine.latents import keep_latents
from services.worker.engine.loading_progress import PHASE
from services.worker.engine.model_faults import AttendsOtherwise, refusing
from services.worker.engine.model_loading import check_forward
from services.worker.engine.shared_modules import name_layers
from services.worker.kv.device_pool import TORCH_DTYPES
from services.worker.parallel.collectives import Collectives
from services.worker.parallel.division import (
    Share,
    check_divisible,
    config_of_rank,
    head_dim_of,
    kv_heads_of,
    layer_configs,
    narrowed,
)
from services.worker.parallel.narrow_attention import narrow_attention, whole_layers
from services.worker.parallel.plan import DivisionPlan, Style, layer_of
from services.worker.parallel.shared_linears import AbsentHead, JoinedHead, JoinedNorm, SummedModule, replace_module
from services.worker.parallel.stored_weights import Stored, StoredWeights
from shared import progress
from shared.errors import ConfigError, UnsupportedModel

# Making an empty model patches torch's initialisers for as long as it takes.
_MAKING = threading.Lock()


def load_share(model_dir: Path, config: Any, share: Share, *, dtype: str, device: torch.device) -> Any:
    """Load the model with this rank's weights on ``device``, before :func:`connect`.

    Raises ConfigError for a number of ranks by which it does not divide, UnsupportedModel when it cannot be divided at
    all or weights are missing.
    """
    kind = dtype_of(config, dtype)
    check_divisible(config, share.ranks)
    _check_blocks(config)
    mine = config_of_rank(config, share.ranks)
    model = _empty(mine, share, kind)
    model.tie_weights()
    check_forward(model)
    keep_latents(model)
    name_layers(model)
    plan = DivisionPlan(model)
    _widen(model, config, plan)
    head = _head(model, config, share)
    with torch.no_grad(), ExitStack() as files:
        weights = StoredWeights(model_dir, model, files, kind)
        _check_tied(model, weights)
        if share.ranks > 1 and whole_layers(model, plan, weights):
            narrow_attention(model, _empty(narrowed(mine, share.ranks), share, kind), plan, weights)
        _fill(weights, model, config, share, plan, head)
    if (model_dir / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(model_dir, local_files_only=True)
    model.eval().requires_grad_(False)
    return model.to(device)


def has_sinks(config: Any, share: Share) -> bool:
    """Return whether layers of a model of ``config`` have attention sinks, which its modules show without weights."""
    with torch.device("meta"):
        model = _empty(config_of_rank(config, share.ranks), share, torch.float32)
    return any(name.endswith(".sinks") for name, _ in model.named_parameters())


def _empty(mine: Any, share: Share, kind: torch.dtype) -> Any:
    """Return a model of the configuration ``mine``, of this rank's share, whose weights are undefined.

    Raises UnsupportedModel where its class makes none of that size, or none with our attention.
    """
    try:
        with _MAKING, no_init_weights(), refusing(mine.model_type, "made as large as the share of a rank"):
            return AutoModelForCausalLM.from_config(mine, dtype=kind, attn_implementation=ATTENTION_NAME)
    except AttendsOtherwise as error:
        raise UnsupportedModel(
            f"--tensor-parallel {share.ranks}: {mine.model_type} attends by code of its own to K and V of heads, which "
            "no group divides"
        ) from error


def _check_blocks(config: Any) -> None:
    """Raise UnsupportedModel for layers whose compressed blocks no group keeps, before weights are looked for."""
    if not set(COMPRESSED_TYPES).isdisjoint(getattr(config, "layer_types", None) or ()):
        raise UnsupportedModel(f"{config.model_type} attends to compressed blocks of tokens, which no group divides")


def dtype_of(config: Any, dtype: str) -> torch.dtype:
    """Return the data type of weights and KV.

    Raises ConfigError for an unknown one, or where ``auto`` is not in the configuration.
    """
    if dtype != "auto" and dtype not in TORCH_DTYPES:
        raise ConfigError(f"dtype must be auto or one of {', '.join(TORCH_DTYPES)}, not {dtype!r}")
    kind = TORCH_DTYPES[dtype] if dtype != "auto" else getattr(config, "dtype", None)
    if not isinstance(kind, torch.dtype):
        raise ConfigError("--dtype auto: the checkpoint's configuration does not say which type it is; name one")
    return kind


def connect(model: Any, config: Any, share: Share, collectives: Collectives) -> None:
    """Insert the collectives into ``model``, which :func:`load_share` has made of ``config``."""
    plan = DivisionPlan(model)
    for name in [*plan.divided(model, "rowwise"), *plan.divided(model, "summed")]:
        replace_module(model, name, SummedModule(model.get_submodule(name), collectives))
    for name in plan.divided(model, "joined"):
        replace_module(model, name, JoinedNorm(model.get_submodule(name), collectives, share.rank))
    name = _head_name(model)
    if _is_tied(model):
        if share.rank > 0:
            replace_module(model, name, AbsentHead())
    elif _divides_vocabulary(config, share):
        replace_module(model, name, JoinedHead(model.get_submodule(name), collectives))


def _widen(model: Any, config: Any, plan: DivisionPlan) -> None:
    """Give norms over the heads of all ranks their whole width."""
    layers = layer_configs(config)
    for name in plan.divided(model, "joined"):
        layer, norm = layers[layer_of(name) or 0], model.get_submodule(name)
        heads = int(layer.num_attention_heads) if name.endswith(".q_norm") else kv_heads_of(layer)
        width = heads * head_dim_of(layer)
        for key, parameter in list(norm.named_parameters(recurse=False)):
            setattr(norm, key, torch.nn.Parameter(parameter.new_empty(width)))
        if hasattr(norm, "normalized_shape"):
            norm.normalized_shape = (width,)


def _head(model: Any, config: Any, share: Share) -> str:
    """Divide the head and return its name; return "" where it is tied or its rows do not divide, and stays whole."""
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


def _check_tied(model: Any, weights: StoredWeights) -> None:
    """Raise UnsupportedModel for a head that is tied to the embeddings, and that the checkpoint has otherwise.

    The library then takes the head as it is stored, in a model that is not divided.
    """
    if not _is_tied(model):
        return
    embedding = model.get_input_embeddings().weight
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is embedding]
    stored = [found for name in names if (found := weights.get(name)) is not None]
    if len(stored) > 1 and any(not torch.equal(each.whole(), stored[0].whole()) for each in stored[1:]):
        raise UnsupportedModel(
            f"the checkpoint stores {' and '.join(names)}, which differ, while its configuration ties them: "
            "set tie_word_embeddings to false in config.json"
        )


def _divides_vocabulary(config: Any, share: Share) -> bool:
    return int(config.vocab_size) % share.ranks == 0


def _fill(weights: StoredWeights, model: Any, config: Any, share: Share, plan: DivisionPlan, head: str) -> None:
    """Copy this rank's slices into ``model``. Raises UnsupportedModel for missing or misshapen weights."""
    layers = layer_configs(config)
    found = [(name, tensor, weights.get(name)) for name, tensor in _tensors(model)]
    missing = [name for name, _, stored in found if stored is None]
    if missing:
        raise UnsupportedModel(f"the checkpoint lacks weights: {', '.join(missing[:4])} ({len(missing)} in all)")
    with progress.phase(PHASE, total=len(found), unit="tensors") as advance:
        for name, tensor, stored in found:
            if stored is not None:
                layer = layers[layer_of(name) or 0]
                part = _part(name, stored, tuple(tensor.shape), layer, share, plan, head)
                if part is None:
                    mine = f"rank {share.rank} cannot have {tuple(tensor.shape)} of it"
                    raise UnsupportedModel(f"{name} has shape {stored.shape}, and {mine}")
                tensor.copy_(part)
            advance(1)


def _part(
    name: str, stored: Stored, mine: tuple[int, ...], config: Any, share: Share, plan: DivisionPlan, head: str
) -> torch.Tensor | None:
    """Return this rank's part of one tensor, of shape ``mine``; None where no division explains that shape."""
    module, _, kind = name.rpartition(".")
    style = "colwise" if head and module == head else plan.style(name) or plan.style(module)
    shape = stored.shape
    if style == "once" or (style == "rowwise" and kind == "bias"):
        # Outputs are summed, so one rank alone adds the bias.
        return (stored.whole() if share.rank == 0 else torch.zeros(mine)) if shape == mine else None
    if style == "summed":
        return None  # Tensors that every rank has whole, such as biases of experts, would be summed as well.
    if style in (None, "joined") or len(shape) != len(mine):
        return stored.whole() if shape == mine else None
    dim = _divided_dim(name, style, len(shape))
    others = [(size, own) for at, (size, own) in enumerate(zip(shape, mine, strict=True)) if at != len(shape) + dim]
    parts = _parts(style, shape[dim], mine[dim], config, share)
    if not parts or sum(map(len, parts)) != mine[dim] or any(size != own for size, own in others):
        return None
    return stored.read(dim, parts)


def _divided_dim(name: str, style: Style, dims: int) -> int:
    """Return the dimension, from the end, in which a tensor of this style is divided."""
    if style in ("rowwise", "packed_rowwise", "transposed_colwise") or dims == 1 or name.endswith("_bias"):
        return -1
    return -2


def _parts(style: Style, total: int, mine: int, config: Any, share: Share) -> list[range]:
    """Return which of ``total`` rows or columns are this rank's ``mine``, none where no division explains it.

    ``config`` is that of the layer.
    """
    kv_heads = kv_heads_of(config)
    if style == "qkv":
        heads, head_dim = int(config.num_attention_heads), head_dim_of(config)
        sections = [(heads, share.query_heads(heads)), *[(kv_heads, share.kv_heads(kv_heads))] * 2]
        first, parts = 0, []
        for count, own in sections:
            parts.append(range((first + own.start) * head_dim, (first + own.stop) * head_dim))
            first += count
        return parts if first * head_dim == total else []
    packs = 2 if style.startswith("packed") else 1
    rows = share.rows(total // packs, mine // packs, kv_heads)
    if rows is None or total % packs:
        return []
    each = total // packs
    return [range(pack * each + rows.start, pack * each + rows.stop) for pack in range(packs)]


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, tied ones once, and the buffers that checkpoints hold."""
    yield from model.named_parameters()
    stored = model.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in stored)
