"""Cells of this commit and of an earlier one, and vLLM, which all serve the same model."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx

from bench.peers.command_line import shape_of
from bench.peers.systems import Bounds
from bench.peers.vllm import VllmServer, running_vllm
from bench.structured_output import ROOT
from thermocline.supervisor.api import RunningCell, running
from thermocline.supervisor.config import SupervisorConfig

NOW, BEFORE, VLLM = "ours", "before", "vllm"
HOST_BYTES = 2**29
MAX_RUNNING = 32


def bounds_of(model: Path, device_tokens: int, threads: int) -> Bounds:
    """The same for every server."""
    return Bounds(
        model=model,
        shape=shape_of(model),
        threads=threads,
        device_tokens=device_tokens,
        host_bytes=HOST_BYTES,
        max_running=MAX_RUNNING,
    )


@contextmanager
def cell(bounds: Bounds, root: Path, *, schedulers: int = 1) -> Iterator[RunningCell]:
    """A cell of the code in ``root``. Raises CellNotReady."""
    config = SupervisorConfig(
        model=str(bounds.model),
        dtype="bfloat16",
        port=0,
        schedulers=schedulers,
        threads=bounds.threads,
        device_kv_bytes=bounds.device_bytes,
        host_kv_bytes=bounds.host_bytes,
        max_running=bounds.max_running,
        log_level="warning",
    )
    with running(config, environ={"PYTHONPATH": str(root)}) as made:
        yield made


def model_name(base_url: str) -> str:
    """As requests name it. Raises httpx.HTTPError."""
    name: str = httpx.get(f"{base_url}/v1/models", trust_env=False).raise_for_status().json()["data"][0]["id"]
    return name


def vllm(bounds: Bounds, folder: Path, env: Path, preloads: list[Path]) -> AbstractContextManager[VllmServer]:
    """vLLM with prefix caching. Raises PeerFailed."""
    return running_vllm(VLLM, bounds, folder, env, preloads)


def tree_of(ref: str, folder: Path) -> tuple[Path, str]:
    """The files of a commit, put below ``folder``, and its name. Raises subprocess.CalledProcessError."""
    commit = _git("rev-parse", "--short=12", f"{ref}^{{commit}}").decode().strip()
    out = folder / f"tree-{commit}"
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as archive:
        archive.extractall(out, filter="data")
    return out, commit


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, cwd=ROOT).stdout
