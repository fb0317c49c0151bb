"""What each way back onto the device costs here: the figures that a restoration planner works with (HCache section
4.1.2 finds them offline for each machine and model).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from services.worker.engine.forward_meta import Segment, pages_for
from services.worker.engine.model_runner import ModelRunner
from services.worker.kv.measured_loads import load_scene, medians
from services.worker.kv.movers import DEFAULT_MOVER, make_mover
from services.worker.kv.pinning import cuda_pins
from services.worker.restore.first_layers import compute_first_layers
from services.worker.restore.hidden_shape import HiddenShape
from services.worker.restore.hidden_source import PieceSource
from services.worker.restore.kv_slots import KvSlots
from services.worker.restore.pieces import HiddenPiece
from services.worker.restore.projection import KvProjection
from shared.chunks import CHUNK_TOKENS
from shared.errors import ConfigError
from shared.messages.pools import KvGeometry

VERSION = 1
PREFIX = "thermocline-restore"


class RestorationFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per layer and token for a prefix of ``tokens`` tokens, medians (HCache section 4.1.2's IO_H, IO_KV, C_H
    and C_Token, each divided by the tokens). Recomputation alone grows with the length, for its attention.
    """

    tokens: int
    io_hidden_s: float  # From host memory, verified.
    io_kv_s: float  # From host memory, verified.
    compute_hidden_s: float
    compute_token_s: float


class RestorationProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Holds for this model, dtype and machine. ``device`` is cpu or cuda; figures are in order of their lengths."""

    version: int = VERSION
    geometry: KvGeometry
    hidden: int
    device: str
    figures: tuple[RestorationFigure, ...]

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one token's hidden states in one layer."""
        return HiddenShape(self.geometry.layers, self.hidden, self.geometry.dtype).row_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's KV in one layer."""
        return self.geometry.token_bytes // self.geometry.layers

    def to_json(self) -> bytes:
        """As the command line writes it."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> RestorationProfile:
        """Raises ConfigError for anything that :meth:`to_json` of this version does not write."""
        try:
            profile = msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise ConfigError(f"no profile of restoration: {error}") from error
        if profile.version != VERSION:
            raise ConfigError(f"the profile of restoration has version {profile.version}, not {VERSION}")
        return profile


def measure_restoration(runner: ModelRunner, lengths: Sequence[int], *, rounds: int = 5) -> RestorationProfile:
    """Measure prefixes of these lengths, in tokens. Overwrites the pool: call it before any request is admitted.

    Raises HiddenStatesUnsupported for a model whose hidden states do not restore it, ConfigError for a length that the
    pool or the model cannot hold.
    """
    projection, geometry = KvProjection(runner), runner.geometry
    longest = min(runner.pool.pages * geometry.page_size, runner.max_context)
    wrong = [length for length in lengths if not geometry.page_size <= length <= longest]
    if wrong or not lengths or rounds < 1:
        raise ConfigError(f"prefixes of {wrong or 'no'} tokens cannot be measured; the longest here has {longest}")
    return RestorationProfile(
        geometry=geometry,
        hidden=projection.shape.hidden,
        device=runner.pool.device.type,
        figures=tuple(_measure(runner, projection, tokens, rounds) for tokens in sorted(set(lengths))),
    )


def _measure(runner: ModelRunner, projection: KvProjection, tokens: int, rounds: int) -> RestorationFigure:
    shape, geometry, device = projection.shape, runner.geometry, runner.pool.device
    pages = np.arange(pages_for(tokens, geometry.page_size), dtype=np.int32)
    segment = Segment(tokens, 0, pages)
    slots = KvSlots.of_segment(segment, geometry.page_size, device)
    embeddings = projection.position_embeddings(torch.arange(tokens))
    ids = torch.arange(tokens) * 7919 % runner.vocab_size
    hidden = torch.zeros(tokens, shape.hidden, dtype=shape.torch_dtype, device=device)
    host = np.zeros((pages_for(tokens, CHUNK_TOKENS), 1, CHUNK_TOKENS, shape.row_bytes), dtype=np.uint8)
    source = PieceSource(shape, _pieces(host), 0, tokens, [0])
    pins = cuda_pins(device)
    if pins is not None:
        pins.pin(host.reshape(-1))

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def transmit() -> None:
        source.read(0, 0, tokens, hidden)
        wait()

    def project() -> None:
        for layer in range(geometry.layers):
            projection.restore(layer, hidden, embeddings, slots)
        wait()

    def recompute() -> None:
        compute_first_layers(runner, ids, segment, geometry.layers)
        wait()

    try:
        with load_scene(geometry, tokens, device=str(device), shm_prefix=PREFIX) as scene:
            mover = make_mover(scene.device, DEFAULT_MOVER, programs=1)

            def load() -> None:
                scene.load(mover, verified=True)

            works: dict[str, Callable[[], object]] = {
                "transmit": transmit,
                "load": load,
                "project": project,
                "recompute": recompute,
            }
            spent = medians(works, rounds)
            loaded = len(scene.pages) * geometry.page_size
    finally:
        if pins is not None:
            pins.unpin(host.reshape(-1))
    return RestorationFigure(
        tokens=tokens,
        io_hidden_s=spent["transmit"] / tokens,
        io_kv_s=spent["load"] / (loaded * geometry.layers),
        compute_hidden_s=spent["project"] / (tokens * geometry.layers),
        compute_token_s=spent["recompute"] / (tokens * geometry.layers),
    )


def _pieces(rows: np.ndarray) -> list[HiddenPiece]:
    """Pieces of one layer over ``rows``, uint8 [pieces, 1, 64, row_bytes]."""
    return [HiddenPiece.seal("measured", index * CHUNK_TOKENS, (0,), piece) for index, piece in enumerate(rows)]
