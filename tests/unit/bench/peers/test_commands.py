"""Comparing with peers: command lines, bounds, and what is wrong with a line."""

import dataclasses
import json
from pathlib import Path

import pytest

from bench.peers.command_line import faults, parser, shape_of
from bench.peers.llama import llama_command
from bench.peers.ours import cell_config
from bench.peers.systems import SYSTEMS, Bounds, Shape
from bench.peers.vllm import Cache, lmcache_command, vllm_command, vllm_environment
from thermocline.supervisor.config import to_flags

SHAPE = Shape(layers=12, kv_heads=4, head_dim=64, vocabulary=16_384, context=16_384)
BOUNDS = Bounds(
    model=Path("a-model"), shape=SHAPE, threads=2, device_tokens=16_384, host_bytes=2**31, max_running=8, served="m"
)


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


@pytest.fixture
def env(tmp_path: Path) -> Path:
    """An environment in which both programs are."""
    (tmp_path / "bin").mkdir()
    for name in ("python", "lmcache"):
        (tmp_path / "bin" / name).touch()
    return tmp_path


def test_every_system_gets_the_same_kv_bound_on_the_device() -> None:
    """In tokens, blocks less the one that vLLM keeps for itself, and bytes of bfloat16 KV."""
    vllm = vllm_command(Path("env"), BOUNDS, 1, is_caching=True, cache=None)
    llama = llama_command(Path("llama-server"), Path("w.gguf"), BOUNDS, 1)
    ours = cell_config("ours", BOUNDS, Path("folder"))

    assert (int(option(vllm, "--num-gpu-blocks-override")) - 1) * int(option(vllm, "--block-size")) == 16_384
    assert int(option(vllm, "--kv-cache-memory-bytes")) == 129 * 128 * SHAPE.kv_bytes_per_token
    assert option(llama, "--ctx-size") == "16384"
    assert ours.device_kv_bytes == 16_384 * 12 * 2 * 4 * 64 * 2


def test_vllm_is_told_of_no_longer_context_than_its_device_holds() -> None:
    """Else it does not start."""
    small = dataclasses.replace(BOUNDS, device_tokens=8_704)

    assert option(vllm_command(Path("env"), small, 1, is_caching=True, cache=None), "--max-model-len") == "8704"
    assert option(vllm_command(Path("env"), BOUNDS, 1, is_caching=True, cache=None), "--max-model-len") == str(
        min(16_384, SHAPE.context)
    )


def test_every_system_runs_as_many_requests_on_as_many_threads() -> None:
    """Eight requests and two threads."""
    vllm = vllm_command(Path("env"), BOUNDS, 1, is_caching=True, cache=None)
    llama = llama_command(Path("llama-server"), Path("w.gguf"), BOUNDS, 1)
    ours = cell_config("ours", BOUNDS, Path("folder"))

    assert option(vllm, "--max-num-seqs") == str(ours.max_running) == "8"
    assert option(llama, "--parallel") == "4"  # More would not fit its KV, where slots share nothing.
    assert option(llama, "--threads") == option(llama, "--threads-batch") == str(ours.threads) == "2"
    assert vllm_environment(Path("env"), BOUNDS, [], [3, 0, 1])["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"


def test_host_memory_is_bounded_alike() -> None:
    """2 GiB of it."""
    cache = Cache(port=5, http_port=6, disk_folder=None)
    lmcache = lmcache_command(Path("env"), BOUNDS, cache)

    assert option(lmcache, "--l1-size-gb") == "2"
    assert option(llama_command(Path("s"), Path("w"), BOUNDS, 1), "--cache-ram") == "2048"
    assert "2147483648" in to_flags(cell_config("ours", BOUNDS, Path("folder")))


def test_prefix_caching_is_said_either_way() -> None:
    """Neither is left to a default that may change."""
    assert "--enable-prefix-caching" in vllm_command(Path("env"), BOUNDS, 1, is_caching=True, cache=None)
    assert "--no-enable-prefix-caching" in vllm_command(Path("env"), BOUNDS, 1, is_caching=False, cache=None)


def test_vllm_finds_the_cache_server_that_was_started_beside_it() -> None:
    """Its connector has the port, and the server the disk."""
    cache = Cache(port=5556, http_port=6, disk_folder=Path("disk"))
    vllm = vllm_command(Path("env"), BOUNDS, 1, is_caching=True, cache=cache)
    lmcache = lmcache_command(Path("env"), BOUNDS, cache)

    transfer = json.loads(option(vllm, "--kv-transfer-config"))
    assert transfer["kv_connector_extra_config"]["lmcache.mp.port"] == 5556
    assert option(lmcache, "--port") == "5556"
    assert option(lmcache, "--chunk-size") == option(vllm, "--block-size")
    assert json.loads(option(lmcache, "--l2-adapter")) == {"type": "fs", "base_path": "disk"}


def test_a_cache_server_without_a_disk_gets_none() -> None:
    """No second tier is named."""
    assert "--l2-adapter" not in lmcache_command(Path("env"), BOUNDS, Cache(port=5, http_port=6, disk_folder=None))


def test_libraries_are_preloaded_before_the_environments_own(tmp_path: Path) -> None:
    """Intel's OpenMP only where the environment has it."""
    assert vllm_environment(tmp_path, BOUNDS, [Path("tcmalloc.so")], [0, 1])["LD_PRELOAD"] == "tcmalloc.so"

    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    preloaded = vllm_environment(tmp_path, BOUNDS, [Path("tcmalloc.so")], [0, 1])["LD_PRELOAD"]
    assert preloaded == f"tcmalloc.so:{tmp_path}/lib/libiomp5.so"


def test_only_the_system_with_a_disk_gets_a_folder() -> None:
    """Below the folder of its own."""
    assert cell_config("ours", BOUNDS, Path("f")).disk_dir == ()
    assert cell_config("ours-disk", BOUNDS, Path("f")).disk_dir == ("f/disk",)


def test_a_good_line_has_no_faults(env: Path) -> None:
    """Several workloads may share one start of the servers."""
    line = ["documents", "burst", "--systems", "ours, vllm,ours", "--vllm-env", str(env), "--rounds", "1"]
    options = parser().parse_args(line)

    assert faults(options) == []
    assert options.systems == ("ours", "vllm")
    assert options.workloads == ["documents", "burst"]


def test_every_fault_of_a_line_is_named(env: Path) -> None:
    """All at once."""
    line = ["fits", "--systems", "vllm,llama,nothing", "--vllm-env", str(env / "bin"), "--rounds", "0"]
    line += ["--share", "2", "--model", "nowhere", "--preload", "no-library", "--threads", "100000"]
    found = "\n".join(faults(parser().parse_args(line)))

    for part in (
        "'nothing'",
        "bin/python",
        "--llama-server",
        "--rounds",
        "--share",
        "nowhere",
        "no-library",
        "--threads",
    ):
        assert part in found


def test_our_servers_need_no_peers() -> None:
    """Each system says what it needs."""
    assert faults(parser().parse_args(["unshared", "--systems", "ours,ours-disk"])) == []
    assert {SYSTEMS[name].needs for name in ("vllm", "vllm-uncached", "lmcache", "lmcache-disk")} == {"vllm_env"}


def test_the_shape_of_a_model_gives_the_bytes_of_a_token(tmp_path: Path) -> None:
    """A head's size follows from the hidden size where it is not said."""
    config = {"num_hidden_layers": 2, "num_key_value_heads": 3, "num_attention_heads": 6, "hidden_size": 96}
    config |= {"vocab_size": 100, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")

    shape = shape_of(tmp_path)
    assert shape.head_dim == 16
    assert shape.kv_bytes_per_token == 2 * 2 * 3 * 16 * 2
