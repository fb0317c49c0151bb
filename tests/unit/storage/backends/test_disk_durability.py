"""What a loss of power would leave of the disk tier, by a model of what the kernel promises and nothing more.

A killed process tests none of the syncs, because the kernel still has everything. So the tier's system calls are
recorded, and a model keeps what is durable: data of a file after ``sync_data``, a name after ``sync_directory`` of the
directory that holds it. Everything else is lost, as badly as it could be.
"""

from __future__ import annotations

import os
from pathlib import Path

from services.storage.backends.disk import DiskBackend
from services.storage.backends.file_calls import FileCalls
from tests.chunk_makers import MadeChunk, make_chain

CHUNKS = make_chain(6, seed=31) + make_chain(3, seed=32, model="another model")


class PowerModel(FileCalls):
    """What of the tier is on the platter after each call."""

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}
        self._is_data_durable: dict[str, bool] = {}
        self._names: set[str] = set()
        self.durable_names: set[str] = set()
        self.faults: list[str] = []

    def open(self, path: str, flags: int) -> int:
        fd = super().open(path, flags)
        self._paths[fd] = path
        if flags & os.O_CREAT:
            self._names.add(path)
        return fd

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._is_data_durable[self._paths[fd]] = False
        return super().write(fd, data, offset)

    def sync_data(self, fd: int) -> None:
        self._is_data_durable[self._paths[fd]] = True
        super().sync_data(fd)

    def make_directory(self, path: str) -> None:
        super().make_directory(path)
        self._names.add(path)

    def rename(self, source: str, target: str) -> None:
        if not self._is_data_durable.get(source, False):
            self.faults.append(f"{target} has a name before it has data")
        super().rename(source, target)
        self._names = self._names - {source} | {target}
        self._is_data_durable[target] = self._is_data_durable.pop(source)

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self._names.discard(path)

    def sync_directory(self, path: str) -> None:
        super().sync_directory(path)
        inside = {name for name in self._names if os.path.dirname(name) == path}
        gone = {name for name in self.durable_names if os.path.dirname(name) == path} - inside
        self.durable_names = (self.durable_names | inside) - gone

    def survives(self, file: str, root: str) -> bool:
        """Whether the file, with its data and every directory down to it from ``root``, is on the platter."""
        names = [file]
        while (parent := os.path.dirname(names[-1])) != root:
            names.append(parent)
        return self._is_data_durable.get(file, False) and self.durable_names.issuperset(names)


def file_of(path: str, chunk: MadeChunk) -> str:
    return f"{path}/chunks/{chunk.key.path}.chunk"


def test_what_was_answered_survives_a_loss_of_power(tmp_path: Path) -> None:
    """When a put has returned, the data, the name and all directories down to it are durable."""
    paths = [str(tmp_path / name) for name in ("one", "two")]
    for path in paths:
        os.mkdir(path)
    model = PowerModel()
    backend = DiskBackend(paths, calls=model)

    for place, chunk in enumerate(CHUNKS):
        backend.put(chunk.key, chunk.blob, stripe=place, timeout_s=30.0)

        root = paths[place % 2]
        assert model.survives(file_of(root, chunk), root)
    assert model.faults == []
    backend.close()


def test_directories_of_a_predecessor_are_not_trusted(tmp_path: Path) -> None:
    """A directory that is there may have been made by a process that was killed before its name was durable."""
    path = str(tmp_path)
    first = DiskBackend([path])
    first.put(CHUNKS[0].key, CHUNKS[0].blob, stripe=0, timeout_s=30.0)
    first.delete(CHUNKS[0].key, timeout_s=30.0)
    first.close()
    folder = os.path.dirname(file_of(path, CHUNKS[0]))
    model = PowerModel()
    synced: list[str] = []
    model.sync_directory = synced.append  # type: ignore[assignment, method-assign]
    second = DiskBackend([path], calls=model)
    synced.clear()

    second.put(CHUNKS[0].key, CHUNKS[0].blob, stripe=0, timeout_s=30.0)
    second.put(CHUNKS[1].key, CHUNKS[1].blob, stripe=0, timeout_s=30.0)

    levels = [f"{path}/chunks"]
    for part in os.path.relpath(folder, levels[0]).split(os.sep):
        levels.append(f"{levels[-1]}/{part}")
    assert synced[:4] == levels
    assert synced[-1] == os.path.dirname(file_of(path, CHUNKS[1]))
    assert synced.count(f"{path}/chunks") == 1
    second.close()
