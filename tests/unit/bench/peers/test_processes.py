"""Comparing with peers: their processes."""

import os
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from bench.peers.processes import PeerFailed, process, segments_of
from bench.peers.processor_time import drop_from_page_cache, read_processes, settle, trees, used_s
from thermocline.supervisor.ports import free_port

SERVES = "import http.server, sys; http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]))"
STUBBORN = "import signal, subprocess, sys, time; subprocess.Popen(['sleep', '300']); time.sleep(300)"


def test_a_server_is_waited_for_and_ended(tmp_path: Path) -> None:
    """It answers in the block, and is gone after it."""
    port = free_port()
    with process("it", [sys.executable, "-c", SERVES, str(port)], {}, tmp_path) as server:
        server.wait_until_serving(f"http://127.0.0.1:{port}/", timeout_s=60)
        settle([server.pid])
        assert used_s([server.pid]) > 0

    assert server.pid not in read_processes()


def test_a_server_that_ends_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    """At once, not when time is up."""
    began_s = time.monotonic()
    with (
        process("it", [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"], {}, tmp_path) as server,
        pytest.raises(PeerFailed, match=r"exit code 3\s+no such model"),
    ):
        server.wait_until_serving("http://127.0.0.1:9/", timeout_s=300)

    assert time.monotonic() - began_s < 100


def test_a_server_that_does_not_serve_is_given_up(tmp_path: Path) -> None:
    """After the time that it is given."""
    with (
        process("it", [sys.executable, "-c", "import time; time.sleep(300)"], {}, tmp_path) as server,
        pytest.raises(PeerFailed, match="does not serve after 0 s"),
    ):
        server.wait_until_serving(f"http://127.0.0.1:{free_port()}/", timeout_s=0)


def test_children_end_with_their_server(tmp_path: Path) -> None:
    """Those that its own end does not take along, too."""
    with process("it", [sys.executable, "-c", STUBBORN], {}, tmp_path) as server:
        while len(family := trees(read_processes(), [server.pid])) < 2:
            time.sleep(0.01)  # Nothing tells when a process has started another.

    assert not set(family) & {pid for pid, _ in read_processes().items() if _is_alive(pid)}


def _is_alive(pid: int) -> bool:
    """Not one that has ended and is waiting for somebody to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_shared_memory_of_a_process_is_found_by_what_it_maps() -> None:
    """By the name of its file."""
    segment = shared_memory.SharedMemory(create=True, size=4096)
    try:
        assert Path("/dev/shm") / segment.name in segments_of([os.getpid()])
    finally:
        segment.close()
        segment.unlink()
    assert Path("/dev/shm") / segment.name not in segments_of([os.getpid()])


def test_files_are_still_there_when_the_kernel_has_let_go_of_them(tmp_path: Path) -> None:
    """In folders below, too."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_bytes(b"kept")

    drop_from_page_cache(tmp_path)

    assert (tmp_path / "below" / "file").read_bytes() == b"kept"
