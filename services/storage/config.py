"""Settings of one storage."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shared.broker import BrokerSettings
from shared.ids import is_valid_name, node_name
from shared.tracing import Traces

DEFAULT_KEY_VARIABLE = "THERMOCLINE_KEY_DEFAULT"
"""Variable with the key of tenants without one; no flag, because every user of the machine can read command lines."""


class StorageConfig(BrokerSettings, frozen=True, kw_only=True):
    """Every setting with its default; ``--help`` prints the descriptions."""

    id: Annotated[str, Meta(description="name of this storage, unique in its cell")] = "storage-0"
    node: Annotated[str, Meta(description="name of this machine; by default its host name")] = ""
    host_kv_bytes: Annotated[int, Meta(description="host memory for KV, tables included", ge=1)] = 1024**3
    hidden_bytes: Annotated[
        int,
        Meta(description="memory for hidden states in transit to or from disk, tables included; 0 keeps none", ge=0),
    ] = 256 * 2**20
    shm_prefix: Annotated[str, Meta(description="start of the names of this cell's files in /dev/shm")] = "thermocline"
    disk_dir: Annotated[
        tuple[str, ...],
        Meta(description="directories of the disk tier, chunks go to them in turn; none is no disk tier"),
    ] = ()
    disk_kv_bytes: Annotated[int, Meta(description="disk space for chunks, in all directories", ge=2**20)] = (
        10 * 1024**3
    )
    disk_read_bytes_per_s: Annotated[
        int, Meta(description="highest read rate of the disk tier, bytes a second, such as 500MB; 0: no limit", ge=0)
    ] = 0
    measure_at_start: Annotated[
        bool, Meta(description="measure how fast the disk is read, once, where it was not measured yet")
    ] = True
    disk_direct: Annotated[bool, Meta(description="bypass the page cache where the file system allows")] = True
    sparse: Annotated[
        bool, Meta(description="keep KV on the disk a second time, in a form whose important part can be read")
    ] = False
    sparse_block_tokens: Annotated[
        int,
        Meta(
            description="tokens of a block of that form, a power of two; 0: what a disk block holds",
            ge=0,
            le=64,
        ),
    ] = 0
    remote: Annotated[
        str, Meta(description="object store: s3://bucket/path, gs://, az:// or file:///directory; empty is none")
    ] = ""
    remote_timeout_ms: Annotated[int, Meta(description="longest wait for one object, retries included", ge=1)] = 5_000
    share: Annotated[
        Literal["off", "nixl"],
        Meta(description="let storages of other nodes read this host memory, and read theirs: off, or by NIXL"),
    ] = "off"
    handover_ms: Annotated[
        int,
        Meta(
            description="longest wait at a stop, with --share, for other nodes to copy hot pages; 0 is none",
            ge=0,
            le=30_000,
        ),
    ] = 5_000
    handover_bytes: Annotated[
        int, Meta(description="most host memory that other nodes copy at a stop; 0 is none", ge=0)
    ] = 4 * 2**30
    io_threads: Annotated[int, Meta(description="chunks that are read or written at once", ge=1, le=256)] = 8
    max_saves: Annotated[int, Meta(description="saves of either form that may wait or run; more are refused", ge=1)] = (
        1024
    )
    staging_bytes: Annotated[
        int, Meta(description="memory for chunks in transit to or from disk, for each form that is kept", ge=2**20)
    ] = 256 * 2**20
    keys: Annotated[
        str, Meta(description="TOML file of encryption keys by cache salt; empty leaves chunks unencrypted")
    ] = ""
    threads: Annotated[int, Meta(description="threads that copy pages", ge=1, le=64)] = 2
    backup_share: Annotated[
        float,
        Meta(description="part of the time in which pages may be copied from devices; 1 is all of it", gt=0, le=1),
    ] = 1.0
    max_transfers: Annotated[int, Meta(description="backups that may wait or run; more are refused", ge=1)] = 4096
    metrics_port: Annotated[int, Meta(description="port for /metrics; 0 is off", ge=0, le=65_535)] = 0
    metrics_host: Annotated[str, Meta(description="address on which /metrics is served there")] = "127.0.0.1"
    traces: Traces = ""
    log_level: Annotated[str, Meta(description="debug, info, warning or error")] = "info"

    def __post_init__(self) -> None:
        """Check names, broker settings, block size and log level, and name all faults in one ValueError."""
        faults = [
            f"--{flag} {value!r} must be 1 to 64 letters, digits, - or _"
            for flag, value in (("id", self.id), ("node", self.node or "node"), ("shm-prefix", self.shm_prefix))
            if not is_valid_name(value)
        ]
        faults += self.broker_faults()
        if self.sparse_block_tokens & (self.sparse_block_tokens - 1):
            faults.append(f"--sparse-block-tokens {self.sparse_block_tokens} is not a power of two")
        if self.log_level.lower() not in ("debug", "info", "warning", "error"):
            faults.append(f"--log-level {self.log_level!r} is not one of debug, info, warning, error")
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def node_name(self) -> str:
        """Name of this storage's machine: ``node``, or by default the host name."""
        return self.node or node_name()
