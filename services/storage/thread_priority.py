"""Low priority for background threads, which yield to everything else.

On full cores an unhindered backup halves the speed of the model (``infra/adr/0003-storage-drives-backups.md``).
"""

from __future__ import annotations

import os
import threading

from shared import logs

# Against a process of niceness 0 such a thread gets about a tenth of a contended core, and all of a free one.
COPY_NICENESS = 10

_log = logs.get_logger("storage")


def lower_priority() -> None:
    """Lower the priority of the calling thread."""
    try:
        # On Linux this sets the niceness of the calling thread alone, so the event loop keeps its own.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COPY_NICENESS)
    except OSError as error:
        _log.warning("priority_not_lowered", reason=str(error))
