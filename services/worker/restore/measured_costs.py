"""The cost of restoring here, as ``thermocline doctor --profile --model`` measured it, for the scheduler's planner.

A faulty profile does not keep a worker from starting: the log says why, and the worker measures the costs by itself, if
it may.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from services.worker.engine.model_runner import ModelRunner
from services.worker.kv.movers.choice import machine_here
from services.worker.kv.profile import Machine, Profile, ProfileForeign, default_path, read_profile
from services.worker.parallel.group_runner import GroupRunner
from services.worker.restore.costs import costs_of
from services.worker.restore.figures import RestorationProfile
from services.worker.restore.first_measure import first_costs
from services.worker.restore.profile import measure_first, subject
from services.worker.restore.projection import KvProjection
from services.worker.restore.refusals import HiddenStatesUnsupported
from shared import logs
from shared.errors import ConfigError
from shared.messages.worker_events import RestorationCosts

_log = logs.get_logger("worker")


def prove_projection(runner: ModelRunner | GroupRunner, staging_bytes: int = 0) -> KvProjection | None:
    """Return the proven projection of the model's hidden states to KV.

    None, with a line in the log, where there is none. All ranks of a group prove it, and stage shards in
    ``staging_bytes`` each; the result is the projection of the first.
    """
    try:
        return runner.prove_projection(staging_bytes) if isinstance(runner, GroupRunner) else KvProjection(runner)
    except HiddenStatesUnsupported as error:
        _log.info("hidden_states_unsupported", reason=error.message)
        return None


def measured_costs(
    path: Path | None, runner: ModelRunner | GroupRunner, projection: KvProjection | None, *, threads: int
) -> RestorationCosts | None:
    """Return the costs in the profile at ``path`` (None: where the doctor puts it).

    None where it has no figures of this model on this machine. ``threads`` is the setting with which the runner was
    loaded.
    """
    return costs_for(path, machine_here(), subject(runner, projection, threads=threads))


def costs_of_first_start(
    runner: ModelRunner | GroupRunner, projection: KvProjection | None, *, threads: int
) -> RestorationCosts | None:
    """Return the costs as this worker measures them now, or measured at an earlier start, where no profile has them.

    None where the model's hidden states are of no use: under grouped queries they are wider than the KV that they stand
    for (HCache section 7 leaves such models out), and nothing would be planned with the figures.
    """
    here = subject(runner, projection, threads=threads)
    if not here.hidden or here.hidden_bytes >= here.kv_bytes:
        return None
    return first_costs(here, machine_here(), lambda said: measure_first(runner, here, said=said))


def costs_for(path: Path | None, machine: Machine, here: RestorationProfile) -> RestorationCosts | None:
    """Return the costs of the model that ``here`` describes, as :func:`measured_costs` does."""
    is_named, path = path is not None, path or default_path()
    if not is_named and not path.exists():
        _log.info("restoration_not_measured", advice="thermocline doctor --profile --model DIR measures it")
        return None
    try:
        profile = read_profile(path, machine)
        found = profile.restoration_of(here)
        if found is None:
            _log.info("restoration_not_measured", advice="thermocline doctor --profile --model DIR measures it")
            return None
        costs = _with_link(costs_of(found), profile, found, here)
        if not here.hidden:
            costs = msgspec.structs.replace(costs, hidden=0, hidden_us=0.0)
    except ProfileForeign as error:
        _log.warning("profile_foreign", path=str(path), reason=error.message)
        return None
    except ConfigError as error:
        _log.warning("profile_refused", path=str(path), reason=error.message)
        return None
    _log.info("restoration_costs", **msgspec.structs.asdict(costs))
    return costs


def _with_link(
    costs: RestorationCosts, profile: Profile, found: RestorationProfile, here: RestorationProfile
) -> RestorationCosts:
    """Return the costs with the speed of loads in pages of the size used here, where movers were measured with it."""
    page_size = here.geometry.page_size
    if page_size == found.geometry.page_size:
        return costs
    mover = profile.fastest(here.device, page_size, verified=True)
    if mover is None:
        return costs
    return msgspec.structs.replace(costs, link_bytes_per_us=mover.verified_bytes_per_s / 1e6)
