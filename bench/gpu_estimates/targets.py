"""Targets of speed on GPUs, and which rows estimate each: every target has some, or a reason why it has none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """``rows`` are keys of rows of the first device, the deciding one first; ``reason`` says why there is none."""

    key: str
    says: str
    rows: tuple[str, ...] = ()
    reason: str = ""


TARGETS = (
    Target("default mover", "the GPU-assisted mover is the default on CUDA, page numbers come from pinned memory",
           reason="no figure: it is so or not, which tests of the choice of movers and of its pieces say"),
    Target("loads", "at least 90% of the link's peak at pages of 1 to 32 tokens, verified on the device",
           ("loads_1", "loads_16", "loads_32")),
    Target("slowdown", "a running prefill and decode lose at most 5% beside loads",
           ("slowdown_prefill", "slowdown_decode")),
    Target("backups", "backups go over a side stream of the worker's own mover, in large batches",
           ("backups", "backups_made")),
    Target("kernels", "about ten kernels a layer, in graphs", ("layer_kernels",)),
    Target("batch 1", "Llama-3.1-8B in bfloat16 on an H200: at least 185 tokens/s",
           ("decode", "decode_floor", "decode_budget")),
    Target("batch 64", "the same with 64 requests: not below vLLM",
           ("over_vllm_64_1024", "over_vllm_64_4096", "over_vllm_64_1024_behind", "over_vllm_64_4096_behind",
            "over_vllm_64_1024_read_first", "over_vllm_64_4096_read_first", "parity_1024", "parity_4096")),
    Target("attention", "attention behind a seam of backends, near the roofline",
           ("attention_1_1024", "attention_1_16384", "attention_64_4096")),
    Target("prefill", "prefill near the roofline", ("prefill_2048_roofline", "prefill_8192_roofline")),
    Target("shared document", "a document under many questions is attended once per step",
           ("shared_64_4096", "shared_64_16384", "shared_bytes_64_4096", "shared_bytes_64_16384")),
    Target("device-sized defaults", "max_running and the token budget follow the device",
           reason="no speed: what they come to is [a table of its own](gpu-defaults.md)"),
    Target("overlap", "the host prepares step n+1 while step n runs",
           ("host_share_64", "host_share_1", "device_waits_64", "device_waits_1", "read_first_64", "read_first_1",
            "beside_64", "beside_1")),
    Target("no host read", "nothing is read by the host in a captured step",
           reason="no figure: [counted as none](gpu-step.md#kernels-of-a-step), for all types that can be captured"),
)  # fmt: skip
