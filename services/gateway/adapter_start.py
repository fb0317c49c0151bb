"""LoRA adapters given to a gateway with ``--adapter``: they are ordered from the cell as soon as it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from services.gateway.cache_calls import CacheCalls
from services.gateway.cell import CellView
from shared import logs
from shared.adapters import AdapterFiles, is_adapter_name, read_adapter
from shared.bus.protocol import Bus
from shared.errors import AdapterRefused, ConfigError, Unavailable
from shared.ids import new_id
from shared.messages.cell_events import LoadAdapter
from shared.messages.status import AdapterStatus

RETRY_S = 1.0

_log = logs.get_logger("gateway.adapters")


class StartAdapters:
    """Adapters of ``--adapter`` by name.

    They are ordered once, when the gateway starts; later orders may unload them.
    """

    def __init__(self, files: Mapping[str, AdapterFiles] | None = None) -> None:
        """Take the adapters to order, by name; without any, no adapter is waited for."""
        self.files = dict(files or {})
        self._told_seq = 0 if not self.files else None  # When the scheduler had folded all orders.

    def reasons_not_ready(self, cell: CellView) -> list[str]:
        """Return one reason for each adapter on which no worker has reported yet.

        An adapter unloaded since is not waited for.
        """
        if self._told_seq is None or cell.status is None or cell.status.seq < self._told_seq:
            return [f"adapter {name} was not asked for yet" for name in self.files]
        return [f"adapter {name} is being loaded" for name in self.files if self._is_awaited(cell.adapter(name))]

    def _is_awaited(self, adapter: AdapterStatus | None) -> bool:
        if adapter is None:
            return False
        coming = adapter.replacement
        is_coming = coming is not None and not coming.faults and coming.digest == self.files[adapter.name].digest
        return is_coming or not (adapter.workers or adapter.faults)

    def faults(self, cell: CellView) -> Iterator[tuple[str, str]]:
        """Yield each adapter of ``--adapter`` that a worker could not load: (name, the worker and its fault)."""
        return ((name, fault) for name, fault in _faults(cell) if name in self.files)

    def faults_of_others(self, cell: CellView) -> Iterator[tuple[str, str]]:
        """Yield the same of the adapters that the cell has besides."""
        return ((name, fault) for name, fault in _faults(cell) if name not in self.files)

    async def tell(self, bus: Bus) -> None:
        """Order the adapters from the cell, retrying for as long as the scheduler is silent."""
        calls = CacheCalls(bus)
        seq = 0
        for name, files in self.files.items():
            message_id = new_id("start-adapter")
            while True:
                try:
                    before = next((each for each in (await calls.status()).adapters if each.name == name), None)
                    expects = before.digest if before is not None else ""
                    order = LoadAdapter(name=name, path=str(files.directory), digest=files.digest, expects=expects)
                    seq = (await calls.fold(order, message_id)).seq
                    break
                except Unavailable as error:
                    _log.warning("adapter_not_told", name=name, reason=error.message)
                    await asyncio.sleep(RETRY_S)
            _log.info("adapter_told", name=name, digest=files.digest, path=str(files.directory), rank=files.rank)
        self._told_seq = seq


def _faults(cell: CellView) -> Iterator[tuple[str, str]]:
    for adapter in cell.adapters():
        for worker, fault in adapter.faults.items():
            yield adapter.name, f"{worker}: {fault}"
        if adapter.replacement is not None:
            for worker, fault in adapter.replacement.faults.items():
                yield adapter.name, f"the earlier one is in force: {worker}: {fault}"


def start_adapters(given: Sequence[str], base: str) -> StartAdapters:
    """Read the adapters that ``--adapter`` names. Raises ConfigError with every fault."""
    found: dict[str, AdapterFiles] = {}
    faults = []
    for each in given:
        name, equals, folder = each.partition("=")
        if not equals or not folder or not is_adapter_name(name):
            faults.append(f"--adapter {each!r}: give NAME=DIR, the name as model ids are")
        elif name == base or name in found:
            faults.append(f"--adapter {each!r}: the name {name} is taken")
        else:
            try:
                found[name] = read_adapter(Path(folder).expanduser().resolve())
            except AdapterRefused as error:
                faults.append(f"--adapter {each!r}: {error.message}")
    if faults:
        raise ConfigError.of(faults)
    return StartAdapters(found)
