"""Settings of one worker: ``python -m services.worker --help`` prints them all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from shared.broker import BrokerSettings
from shared.ids import is_valid_name, node_name
from shared.importance import PROBE_HEADS
from shared.messages.pools import KvDtype
from shared.model_folder import find_model
from shared.tracing import Traces

Doc = msgspec.Meta

NOT_ON_CPUS = "its kernels are for GPUs; on a CPU a row depends on its chunk, though not on its batch, in the last bits"


class WorkerConfig(BrokerSettings, frozen=True, kw_only=True):
    """See each field's description; sizes may be written ``64MiB``."""

    model: Annotated[str, Doc(description="directory of a Hugging Face checkpoint with its tokenizer")]
    id: Annotated[str, Doc(description="name of this worker; drawn at random when empty")] = ""
    node: Annotated[str, Doc(description="name of this machine, as its storage has it; by default its host name")] = ""
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Doc(description="where the model runs: cpu, cuda, or auto, which is cuda where a usable GPU is there"),
    ] = "auto"
    gpu: Annotated[int, Doc(description="on cuda, the first of the GPUs that this worker takes", ge=0)] = 0
    node_workers: Annotated[
        int, Doc(description="workers of this machine, which divide its memory and do not share GPUs", ge=1)
    ] = 1
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Doc(description="type of weights and KV; auto is the checkpoint's own"),
    ] = "auto"
    cpu_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Doc(description="the type that --dtype auto stands for on a CPU"),
    ] = "auto"
    kv_dtype: Annotated[
        KvDtype,
        Doc(description="type of K and V in pages; fp8 rounds them to eight bits on every tier, auto keeps --dtype"),
    ] = "auto"
    page_size: Annotated[
        int,
        Doc(description="tokens of one KV page; 0: 16, and more for models whose layers carry states", ge=0, le=1024),
    ] = 0
    max_context_tokens: Annotated[
        int, Doc(description="longest prompt and answer, in tokens; 0 is the model's own context", ge=0)
    ] = 0
    device_kv_bytes: Annotated[
        int,
        Doc(
            description="size of the device pool; 0: on cuda as device_memory_fraction has it, else cpu_kv_bytes", ge=0
        ),
    ] = 0
    cpu_kv_bytes: Annotated[
        int, Doc(description="size of the device pool on a CPU where device_kv_bytes is 0; 0: from free memory", ge=0)
    ] = 0
    device_memory_fraction: Annotated[
        float,
        Doc(
            description="on cuda, part of the GPU's memory for weights, the largest prefill and the device pool",
            gt=0,
            le=1,
        ),
    ] = 0.9
    max_batch_tokens: Annotated[
        int,
        Doc(
            description="tokens of the largest prefill, as the scheduler has it; sizes the pool on cuda; 0: by the GPU",
            ge=0,
        ),
    ] = 0
    device_pages: Annotated[int, Doc(description="pages of the device pool; 0 fills device_kv_bytes", ge=0)] = 0
    threads: Annotated[int, Doc(description="CPU threads of the model, of all ranks; 0 is torch's default", ge=0)] = 0
    attention: Annotated[
        Literal["auto", "triton", "flashinfer"],
        Doc(
            description="on cuda, whose kernels attend; auto: flashinfer where it is installed and proven, else triton"
        ),
    ] = "auto"
    exact: Annotated[
        bool,
        Doc(description="on cuda, a row's bits do not depend on batch, chunks or cache, at a price; refused elsewhere"),
    ] = False
    forward: Annotated[
        Literal["auto", "fused", "portable"],
        Doc(
            description="fused kernels for models like Llama: auto takes them on a GPU, and on CPUs they are faster on"
        ),
    ] = "auto"
    decode_graph_rows: Annotated[
        int,
        Doc(description="on cuda, decode steps of up to so many requests run as CUDA graphs; 0: none", ge=0, le=512),
    ] = 64
    tensor_parallel: Annotated[
        int, Doc(description="processes that share the model, with a GPU each on cuda; this one is the first", ge=1)
    ] = 1
    rank_timeout_ms: Annotated[
        int, Doc(description="longest wait of one such process for another; past it the worker ends", ge=1000)
    ] = 60_000
    prompt_lookup_tokens: Annotated[
        int,
        Doc(
            description="on a CPU, tokens that a request may propose a step from its own text, to be verified; 0: none",
            ge=0,
            le=64,
        ),
    ] = 0
    lease_low_tokens: Annotated[
        int, Doc(description="decode room below which more pages are asked for; half of a small lease", ge=1)
    ] = 32
    load_timeout_ms: Annotated[
        int, Doc(description="longest wait for one layer of a host load; past it the request recomputes", ge=1)
    ] = 10_000
    restore_staging_bytes: Annotated[
        int, Doc(description="device memory through which hidden states are restored; longer runs go in parts", ge=1)
    ] = 64 * 2**20
    mover: Annotated[
        Literal["auto", "per_page", "batched", "gpu_assisted"],
        Doc(description="how pages reach and leave the device; auto: as measured, or else gpu_assisted on a GPU"),
    ] = "auto"
    mover_programs: Annotated[
        int, Doc(description="GPU programs of 1,024 threads that gpu_assisted may occupy; 0: as measured", ge=0, le=32)
    ] = 0
    verify_host: Annotated[
        Literal["always", "sampled", "never"],
        Doc(description="checksums of host pages before use: all, of a share of pages, or none; identities always"),
    ] = "always"
    verify_host_share: Annotated[
        float, Doc(description="share of pages that sampled checks; all after a failure", gt=0, le=1)
    ] = 0.1
    profile: Annotated[
        str, Doc(description="measurements by thermocline doctor --profile; empty: where it puts them by default")
    ] = ""
    measure_at_start: Annotated[
        bool, Doc(description="measure what restoring from hidden states costs, once, where no profile says it")
    ] = True
    hidden_ring_bytes: Annotated[
        int,
        Doc(description="memory for hidden states that steps leave to be saved; 0 holds those of 4,096 tokens", ge=0),
    ] = 0
    sparse_buffer_bytes: Annotated[
        int,
        Doc(description="shared memory for parts of prefixes read from the disk; 0: none is read in part", ge=0),
    ] = 64 * 2**20
    importance_probe_heads: Annotated[
        int, Doc(description="KV heads whose keys find what is important in a layer (IMPRESS 4.3)", ge=1)
    ] = PROBE_HEADS
    importance_alpha: Annotated[
        float,
        Doc(description="how alike probe heads must be to choose for all; 0: every head chooses, which is H2O", ge=0),
    ] = 0.6
    prefetch_keys: Annotated[
        bool, Doc(description="prefetch the keys by which the next layer of a sparse prefix chooses")
    ] = True
    max_adapters: Annotated[int, Doc(description="LoRA adapters loaded at once; 0: none", ge=0)] = 16
    max_adapter_rank: Annotated[int, Doc(description="highest rank of an adapter that is loaded", ge=1, le=512)] = 64
    adapter_bytes: Annotated[int, Doc(description="memory on the model's device for adapters, as float32", ge=1)] = (
        2**30
    )
    retained_outputs: Annotated[int, Doc(description="finished requests whose tokens can be asked for again", ge=0)] = (
        1024
    )
    pending_events: Annotated[int, Doc(description="events kept while the broker is away", ge=16)] = 65_536
    drain_timeout_ms: Annotated[
        int,
        Doc(
            description="time after SIGTERM to end requests, or resume them and copy hot prefixes elsewhere; 0: none",
            ge=0,
        ),
    ] = 25_000
    stop_timeout_ms: Annotated[int, Doc(description="longest wait for the last step when stopping", ge=1)] = 30_000
    shm_prefix: Annotated[str, Doc(description="prefix of shared-memory names")] = "thermocline"
    data_dir: Annotated[str, Doc(description="where digests of weights are remembered; empty: nowhere")] = ""
    metrics_port: Annotated[int, Doc(description="Prometheus port; 0 is off", ge=0, le=65_535)] = 0
    metrics_host: Annotated[str, Doc(description="address on which /metrics is served there")] = "127.0.0.1"
    traces: Traces = ""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Doc(description="least severe event logged")] = (
        "info"
    )

    def __post_init__(self) -> None:
        """Raise ValueError, with every fault, for invalid names and for settings that contradict one another."""
        faults = self.broker_faults()
        if self.id and not is_valid_name(self.id):
            faults.append(f"--id {self.id!r}: letters, digits, - and _ only, at most 64")
        if self.node and not is_valid_name(self.node):
            faults.append(f"--node {self.node!r}: letters, digits, - and _ only, at most 64")
        if self.forward == "fused" and self.tensor_parallel > 1:
            faults.append("--forward fused: in one process only, not with --tensor-parallel")
        if self.exact and self.device == "cpu":
            faults.append(f"--exact: {NOT_ON_CPUS}")
        if self.exact and self.attention == "flashinfer":
            faults.append("--exact: its attention is ours; not with --attention flashinfer")
        if self.attention == "flashinfer" and (self.tensor_parallel > 1 or self.device == "cpu"):
            faults.append("--attention flashinfer: on one GPU, not with --tensor-parallel or --device cpu")
        if self.exact and self.forward == "fused":
            faults.append("--exact: not with --forward fused, whose kernels were not proven so")
        if self.exact and self.tensor_parallel > 1:
            faults.append("--exact: not with --tensor-parallel, whose sums over ranks are ordered by their size")
        if self.kv_dtype == "fp8" and self.attention == "flashinfer":
            faults.append("--kv-dtype fp8: not with --attention flashinfer, which knows no scales of single tokens")
        if self.kv_dtype == "fp8" and self.exact:
            faults.append("--kv-dtype fp8: not with --exact, whose kernels read KV as it is computed")
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def node_name(self) -> str:
        """Name of this worker's machine: ``node``, or by default the host name."""
        return self.node or node_name()

    def dtype_on(self, kind: Literal["cpu", "cuda"]) -> str:
        """Return the type of weights and KV on this kind of device; "auto" is the checkpoint's own."""
        return self.cpu_dtype if self.dtype == "auto" and kind == "cpu" else self.dtype

    @property
    def rank_threads(self) -> int:
        """CPU threads of each rank; 0 is torch's default, which only a worker of one rank has for itself."""
        if self.tensor_parallel == 1:
            return self.threads
        return max(1, (self.threads or len(os.sched_getaffinity(0))) // self.tensor_parallel)

    @property
    def model_dir(self) -> Path:
        """The checkpoint's folder. Raises ConfigError where there is none."""
        return find_model(self.model)
