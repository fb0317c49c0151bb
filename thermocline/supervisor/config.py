"""Settings of ``thermocline up``. None is the service's own default."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shared.loopback import without_brackets
from shared.tracing import Traces

BUNDLED_MODEL = "thermocline-mha"
PACKAGE_ROOT = Path(__file__).resolve().parents[2]  # The folder that holds thermocline/, services/ and shared/.
INSTALLED_DATA = Path(sysconfig.get_path("data")) / "share" / "thermocline"  # Where pip puts the wheel's data files.


class SupervisorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of section ``[up]``. Raises ValueError for values out of bounds or that exclude each other."""

    model: Annotated[
        str, Meta(description="folder of a Hugging Face model, or hub id in the hub's cache; empty is the bundled one")
    ] = ""
    host: Annotated[str, Meta(description="address that the gateway listens on")] = "127.0.0.1"
    port: Annotated[int, Meta(description="port that the gateway listens on; 0 is any free one")] = 8000
    workers: Annotated[int, Meta(description="number of workers")] = 1
    schedulers: Annotated[int, Meta(description="number of schedulers: one is active, the others stand by")] = 1
    page_size: Annotated[int | None, Meta(description="tokens of a page")] = None
    prefix_caching: Annotated[bool | None, Meta(description="keep KV for later requests and reuse it")] = None
    policy: Annotated[str | None, Meta(description="eviction policy")] = None
    max_context_tokens: Annotated[
        int | None, Meta(description="longest prompt and answer, in tokens; unset is the model's own context")
    ] = None
    device_kv_bytes: Annotated[
        int | None,
        Meta(
            description="device pool of each worker, such as 1GiB; unset is the rest of a GPU, or a part of free memory"
        ),
    ] = None
    device_memory_fraction: Annotated[
        float | None, Meta(description="on cuda, part of the GPU for weights, the largest prefill and the device pool")
    ] = None
    host_kv_bytes: Annotated[
        int | None, Meta(description="host pool of this node, such as 4GiB; unset is a part of free memory")
    ] = None
    adapter: Annotated[
        tuple[str, ...], Meta(description="NAME=DIR: a LoRA adapter to load at the start; several: again, or by commas")
    ] = ()
    disk_dir: Annotated[tuple[str, ...], Meta(description="directories of the disk tier, separated by commas")] = ()
    disk_kv_bytes: Annotated[int | None, Meta(description="disk space for KV, such as 10GiB")] = None
    disk_read_bytes_per_s: Annotated[
        int | None, Meta(description="highest read rate of the disk tier, bytes a second, such as 500MB; 0: no limit")
    ] = None
    hidden_form: Annotated[
        str | None,
        Meta(
            description="what is kept on disk in the place of KV: off, auto, or layers absent/from hidden states/as KV"
        ),
    ] = None
    hidden_bytes: Annotated[
        int | None,
        Meta(description="memory for hidden states in transit to or from disk, such as 256MiB; 0 keeps none"),
    ] = None
    restoring: Annotated[
        str | None,
        Meta(description="how prefixes come back from disk: planned, or always by kv, hidden, recompute or important"),
    ] = None
    importance: Annotated[
        str | None, Meta(description="whether requests may load prefixes in part, which is lossy: off, gated or on")
    ] = None
    importance_gate: Annotated[str, Meta(description="quality gate made by thermocline eval, for gated")] = ""
    importance_ratio: Annotated[
        float | None, Meta(description="share of a prefix that is loaded where a request says nothing; 0 is exact")
    ] = None
    sparse: Annotated[
        bool | None, Meta(description="keep KV on disk a second time in a form that can be read in part")
    ] = None
    profile: Annotated[
        str, Meta(description="measurements by thermocline doctor --profile; empty is where it puts them")
    ] = ""
    remote: Annotated[str, Meta(description="object store for KV, such as s3://bucket/path; empty is none")] = ""
    data_dir: Annotated[str, Meta(description="keeps streams and logs across runs; empty is a temporary one")] = ""
    nats: Annotated[tuple[str, ...], Meta(description="URLs of a running broker; none starts an embedded one")] = ()
    stream_replicas: Annotated[
        int | None, Meta(description="copies of each stream; a cluster of three brokers outlives a loss with 3")
    ] = None
    nats_port: Annotated[int, Meta(description="port of the embedded broker; 0 is any free one")] = 0
    nats_server: Annotated[
        str,
        Meta(description="nats-server program of the embedded broker; empty is the one on PATH, or else the packaged"),
    ] = ""
    dtype: Annotated[
        str | None, Meta(description="data type of weights and KV: auto, float32, bfloat16 or float16")
    ] = None
    kv_dtype: Annotated[
        str | None, Meta(description="type of K and V on every tier: auto, or fp8, which rounds them to eight bits")
    ] = None
    kv_gate: Annotated[
        str, Meta(description="quality gate made by thermocline eval --kv-dtype fp8, or unmeasured; required by fp8")
    ] = ""
    exact: Annotated[
        bool | None, Meta(description="on cuda, the same bits whatever else is computed, at a price; refused elsewhere")
    ] = None
    device: Annotated[
        str | None, Meta(description="cpu, cuda, or auto (the default), which is cuda where a usable GPU is there")
    ] = None
    threads: Annotated[int | None, Meta(description="threads of each worker; unset divides the cores")] = None
    tensor_parallel: Annotated[
        int | None, Meta(description="processes that share the model in each worker, with a GPU each on cuda")
    ] = None
    max_batch_tokens: Annotated[int | None, Meta(description="prefill tokens of one batch")] = None
    max_running: Annotated[int | None, Meta(description="requests that a worker runs at once")] = None
    max_queued: Annotated[int | None, Meta(description="requests that may wait in the cell")] = None
    tls_cert: Annotated[str, Meta(description="PEM file of the gateway's certificate; empty is plain HTTP")] = ""
    tls_key: Annotated[str, Meta(description="PEM file of its private key")] = ""
    traces: Traces = ""
    trace_share: Annotated[
        float | None, Meta(description="share of requests to trace, where the caller sends no traceparent")
    ] = None
    log_level: Annotated[str, Meta(description="debug, info, warning or error")] = "info"
    ready_timeout_s: Annotated[
        float, Meta(description="give up a start in which no process has got any further for this long")
    ] = 300.0
    grace_s: Annotated[float, Meta(description="time for each process to stop by itself")] = 10.0

    def __post_init__(self) -> None:
        """Check bounds and combinations, and name all faults in one ValueError."""
        faults = []
        msgspec.structs.force_setattr(self, "host", without_brackets(self.host))
        if not self.host:
            faults.append("host is empty; 0.0.0.0 listens on every address of this machine")
        for name in ("port", "nats_port"):
            if not 0 <= getattr(self, name) <= 65535:
                faults.append(f"{name} must lie between 0 and 65535")
        for name in (
            "workers",
            "schedulers",
            "page_size",
            "threads",
            "tensor_parallel",
            "max_batch_tokens",
            "max_running",
            "max_queued",
            "max_context_tokens",
            "stream_replicas",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                faults.append(f"{name} must be at least 1")
        sizes = ("device_kv_bytes", "host_kv_bytes", "disk_kv_bytes", "disk_read_bytes_per_s", "hidden_bytes")
        for name in (*sizes, "ready_timeout_s", "grace_s"):
            value = getattr(self, name)
            if value is not None and value < 0:
                faults.append(f"{name} must not be negative")
        if self.device_memory_fraction is not None and not 0 < self.device_memory_fraction <= 1:
            faults.append("device_memory_fraction must be above 0 and at most 1")
        if bool(self.tls_cert) != bool(self.tls_key):
            faults.append("tls_cert and tls_key need each other")
        if self.nats and self.nats_server:
            faults.append("nats_server is the program of an embedded broker, and nats names a running one: give one")
        if self.trace_share is not None and not 0 <= self.trace_share <= 1:
            faults.append("trace_share must lie between 0 and 1")
        if self.log_level.lower() not in ("debug", "info", "warning", "error"):
            faults.append("log_level must be debug, info, warning or error")
        if faults:
            raise ValueError("; ".join(faults))


def bundled_model() -> Path | None:
    """Return the folder of the model in the repository and the wheel; None where there is neither.

    The order: this checkout, a checkout in the working directory, the installed wheel.
    """
    for root in (PACKAGE_ROOT, Path.cwd(), INSTALLED_DATA):
        candidate = root / "models" / BUNDLED_MODEL
        if (candidate / "config.json").is_file():
            return candidate
    return None


def to_flags(settings: msgspec.Struct | Mapping[str, Any]) -> tuple[str, ...]:
    """Return ``settings`` as flags, without None and empty values.

    A struct's default values are left out, too.
    """
    if isinstance(settings, msgspec.Struct):
        settings = {
            field.name: getattr(settings, field.name)
            for field in msgspec.structs.fields(settings)
            if getattr(settings, field.name) != field.default
        }
    flags: list[str] = []
    for name, value in settings.items():
        if value is None or value in ("", ()):
            continue
        if isinstance(value, bool):
            value = "true" if value else "false"
        elif isinstance(value, tuple):
            value = ",".join(value)
        flags += ["--" + name.replace("_", "-"), str(value)]
    return tuple(flags)
