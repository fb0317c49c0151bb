"""HCache's platforms as times of a layer: the paper's IO_KV, IO_H, C_H and C_Token from profiles (its 3.2, 4.1.2, 6).

Copies are of chunks of 64 tokens (4.2.1): from host memory one by one, each with the link's overhead; from disks as
deep in parallel as they need, at the disks' or the link's rate, whichever is lower. With tensor parallelism each
device reads its share, and hidden states are gathered from all (5, multi-GPU).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from services.scheduler.core.hidden.partition import LayerTimes, Partition
from thermocline.simulate.cost import Costs, chunk_attention_s, costs_of, efficiency
from thermocline.simulate.profiles import HardwareProfile, ModelProfile, load_hardware, load_model

CHUNK_TOKENS = 64  # 4.2.1
DISK_GB_S = 6.9  # Of one PM9A3 (6.2.2).

_US = 1e6
_GB = 1e9


@dataclass(frozen=True)
class Platform:
    """``degree`` devices of one kind, and the disks of each; 0 disks is host memory."""

    hardware: str
    model: str
    degree: int = 1
    disks: float = 0.0

    @cached_property
    def hardware_profile(self) -> HardwareProfile:
        return load_hardware(self.hardware)

    @cached_property
    def model_profile(self) -> ModelProfile:
        return load_model(self.model)

    @cached_property
    def costs(self) -> Costs:
        return costs_of(self.hardware_profile, self.model_profile, page_size=CHUNK_TOKENS, tensor_parallel=self.degree)

    @property
    def layers(self) -> int:
        return self.model_profile.layers

    @property
    def kv_bytes(self) -> int:
        """Of a token and layer, on all devices together."""
        return self.model_profile.kv_token_bytes // self.layers

    @property
    def hidden_bytes(self) -> int:
        """Of a token and layer."""
        return self.model_profile.hidden * self.model_profile.dtype_bytes

    @property
    def hidden_flop(self) -> float:
        """To make K and V of a token in a layer, on each device (3.2)."""
        model = self.model_profile
        return 4.0 * model.hidden * model.kv_heads * model.head_dim / self.degree

    @property
    def link_rate(self) -> float:
        """Bytes a second of large copies from host memory to one device."""
        link = self.hardware_profile.link
        return link.bandwidth_gb_s * _GB * link.peak_efficiency

    def read_us(self, token_bytes: float, tokens: int) -> float:
        """To read so much of each token to its device, each device its share."""
        share = token_bytes / self.degree
        if self.disks:
            return tokens * share / min(self.disks * DISK_GB_S * _GB, self.link_rate) * _US
        chunks = tokens / CHUNK_TOKENS
        return tokens * share / self.link_rate * _US + chunks * self.hardware_profile.link.transfer_overhead_us

    def product_us(self, flop: float, rows: int) -> float:
        """A matrix product of so many FLOP a row."""
        return flop * rows / (self.costs.peak_flops * efficiency(self.costs, rows)) * _US

    def hidden_us(self, tokens: int) -> float:
        """K and V of a layer from hidden states, with gathering them; reading the matrix once is the least."""
        profile = self.hardware_profile
        matrix_bytes = self.hidden_flop / 2 * self.model_profile.dtype_bytes
        reading = matrix_bytes / (profile.memory.bandwidth_gb_s * _GB * profile.memory.weight_read_efficiency) * _US
        gathered = tokens * self.hidden_bytes * (self.degree - 1) / self.degree
        gathering = gathered / (profile.peer.bandwidth_gb_s * _GB) * _US
        return max(self.product_us(self.hidden_flop, tokens), reading) + gathering + profile.step.layer_overhead_us

    def tokens_us(self, tokens: int) -> float:
        """A layer from tokens, without context before them."""
        costs, layers = self.costs, self.layers
        reducing = (costs.reduce_latency_s + costs.reduce_row_s * tokens) * _US / layers
        attention = chunk_attention_s(costs, 0, tokens) * _US / layers
        product = self.product_us(costs.layer_flop / layers, tokens)
        reading = costs.weights_s * _US / layers
        return max(product, reading) + attention + reducing + self.hardware_profile.step.layer_overhead_us

    def times(self, tokens: int) -> LayerTimes:
        """Of a history of so many tokens."""
        return LayerTimes(
            io_kv=self.read_us(self.kv_bytes, tokens),
            io_hidden=self.read_us(self.hidden_bytes, tokens),
            compute_hidden=self.hidden_us(tokens),
            compute_tokens=self.tokens_us(tokens),
        )


def pipelined_us(partition: Partition, times: LayerTimes, *, ends_early: bool = False) -> float:
    """Layer after layer with bubbles: tokens first, hidden states as they arrive, KV behind them (4.1.2, Figure 8).

    ``ends_early``: the last layer from tokens ends with its keys and values, unless it is the model's last.
    """
    read = 0.0
    computed = partition.tokens * times.compute_tokens
    if ends_early and partition.tokens and partition.hidden + partition.kv:
        computed += times.compute_hidden - times.compute_tokens
    for _ in range(partition.hidden):
        read += times.io_hidden
        computed = max(computed, read) + times.compute_hidden
    return max(computed, read + partition.kv * times.io_kv)


def speed(partition: Partition, times: LayerTimes, tokens: int) -> float:
    """Restored tokens a second (6, metrics)."""
    return tokens / pipelined_us(partition, times) * _US
