"""Measured costs of restoring on one machine for one model, and their stored form.

HCache section 4.1.2 finds them offline for each machine and model. Nothing here imports torch: the command line stores
and shows what workers measure and read.
"""

from __future__ import annotations

import msgspec

from shared.errors import ConfigError
from shared.messages.pools import DTYPE_BYTES, KvGeometry
from shared.undecodable import UNDECODABLE

VERSION = 2

_IDENTIFYING = (
    "version", "architecture", "configuration", "model_bytes", "forward", "device", "threads", "ranks", "hidden"
)  # fmt: skip
_SHAPE = ("layers", "kv_heads", "head_dim", "dtype")


class RestorationFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per layer and token for a prefix of ``tokens`` tokens, medians.

    These are HCache section 4.1.2's IO_H, IO_KV, C_H and C_Token, each divided by the tokens. Only recomputation grows
    with the length, for its attention; its last layer ends with K and V. Figures of hidden states are 0 for a model
    that cannot be restored from them.
    """

    tokens: int
    io_hidden_s: float  # From host memory, verified.
    io_kv_s: float  # From host memory, verified.
    compute_hidden_s: float  # With what a restoration in parts takes beyond the longer of transmitting and projecting.
    compute_token_s: float


class RestorationProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Figures for one model, dtype and machine. ``device`` is cpu or cuda; figures are in order of their lengths.

    ``hidden`` is the width of a hidden state, 0 where KV cannot be restored from it. ``architecture``, a digest of the
    ``configuration`` (quantisation included) and ``model_bytes`` tell models of equal KV apart, but not models that
    differ in the values of their weights alone: those are equally fast. ``model_bytes`` are those of rank 0 as loaded,
    before a fused forward takes weights over. ``forward`` names the code that computes steps. ``threads`` compute in
    each of ``ranks``, where the device is a CPU.
    """

    version: int = VERSION
    geometry: KvGeometry
    hidden: int
    device: str
    figures: tuple[RestorationFigure, ...]
    architecture: str = ""
    configuration: str = ""
    model_bytes: int = 0
    forward: str = ""
    threads: int = 0
    ranks: int = 1

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one token's hidden states in one layer."""
        return self.hidden * DTYPE_BYTES[self.geometry.dtype]

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's KV in one layer."""
        return self.geometry.token_bytes // self.geometry.layers

    def differences(self, here: RestorationProfile) -> tuple[str, ...]:
        """Return why these figures do not hold for ``here``, whose own figures do not matter; () if they do.

        The size of pages is ignored: only loads of KV depend on it, and little. So is the width of hidden states where
        they are of no use here: all else holds.
        """
        names = [name for name in _IDENTIFYING if name != "hidden" or here.hidden]
        pairs = [(name, getattr(self, name), getattr(here, name)) for name in names]
        pairs += [(name, getattr(self.geometry, name), getattr(here.geometry, name)) for name in _SHAPE]
        return tuple(f"{name} {measured!r} is {found!r} here" for name, measured, found in pairs if measured != found)

    def to_json(self) -> bytes:
        """Return the profile as a measuring process passes it on."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> RestorationProfile:
        """Parse the profile. Raises ConfigError for anything that :meth:`to_json` of this version does not write."""
        try:
            profile = msgspec.json.decode(data, type=cls)
        except UNDECODABLE as error:
            raise ConfigError(f"no profile of restoration: {error}") from error
        if profile.version != VERSION:
            raise ConfigError(f"the profile of restoration has version {profile.version}, not {VERSION}")
        return profile
