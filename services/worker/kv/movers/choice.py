"""The choice of a worker's mover: the configured one, or the one that was measured fastest on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.movers import DEFAULT_MOVER, make_mover
from services.worker.kv.movers.protocol import MoverName, PageMover
from services.worker.kv.profile import Machine, MoverFigure, default_path, read_profile, this_machine
from shared import logs
from shared.errors import ConfigError, DeviceUnproven

_log = logs.get_logger("worker")

DEFAULT_PROGRAMS = 2
"""Programs of ``gpu_assisted`` where nothing has been measured (Strata section 4.2 found two enough on its machines).
"""


SIMPLER: tuple[MoverName, ...] = ("gpu_assisted", "batched", "per_page")
"""Movers in order of replacement: a mover that is not proven is replaced by one behind it."""


def proven_mover(name: MoverName, proven: Sequence[str] | None) -> MoverName:
    """Return ``name``, or the first behind it in ``SIMPLER`` that is among the ``proven``; None: no proof is needed.

    ``gpu_assisted`` leaves memory that is not pinned to ``batched``, so it needs that, too. Raises DeviceUnproven.
    """
    if proven is None:
        return name
    for each in SIMPLER[SIMPLER.index(name) :]:
        if each in proven and (each != "gpu_assisted" or "batched" in proven):
            return each
    raise DeviceUnproven(f"neither the mover {name} nor a simpler one passed its proof; passed: {', '.join(proven)}")


def choose_mover(
    pool: DevicePool,
    name: MoverName | str,
    *,
    programs: int,
    profile: str,
    verified: bool,
    proven: Sequence[str] | None = None,
    default: MoverName | None = None,
    checks_on_device: bool = True,
) -> PageMover:
    """Return the mover for this pool; see the settings ``mover``, ``mover_programs``, ``profile`` and ``verify_host``.

    Where nothing was measured it is ``default``, or else that of the pool's device. With ``checks_on_device`` a mover
    that can verifies checksums there. ``proven`` are movers that passed their proof on this device
    (:func:`proven_mover`). A profile that cannot be used is only logged. Raises ConfigError if this pool cannot have
    the mover that was asked for by name.
    """
    default = default or DEFAULT_MOVER[pool.device.type]
    measured = _measured(pool, Path(profile) if profile else None, verified=verified)
    chosen: Any = name
    if name == "auto":
        chosen = measured.mover if measured is not None else default
    chosen = proven_mover(chosen, proven)
    if not programs:
        is_same = measured is not None and measured.mover == chosen and measured.programs
        programs = measured.programs if measured is not None and is_same else DEFAULT_PROGRAMS
    _log.info("mover_chosen", mover=chosen, programs=programs, measured=measured is not None)
    return make_mover(pool, chosen, programs=programs, checks_on_device=checks_on_device)


def machine_here() -> Machine:
    """Return this machine with the GPUs that torch sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return this_machine(tuple(torch.cuda.get_device_name(index) for index in range(count)))


def _measured(pool: DevicePool, path: Path | None, *, verified: bool) -> MoverFigure | None:
    if path is None and not default_path().exists():
        return None
    try:
        profile = read_profile(path or default_path(), machine_here())
    except ConfigError as error:
        _log.warning("profile_refused", reason=error.message)
        return None
    return profile.fastest(pool.device.type, pool.geometry.page_size, verified=verified)
