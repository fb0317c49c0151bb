"""Distribution of files of tests over processes in which a test that ended its process is not run again."""

from __future__ import annotations

from xdist.scheduler.loadfile import LoadFileScheduling
from xdist.workermanage import WorkerController


class EachTestOnce(LoadFileScheduling):
    """``--dist loadfile``, except that xdist would hand a test that ends its process to one process after another."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Take a process out and queue the rest of its files; the test in which it ended, None if it had done all."""
        for unit in self.assigned_work[node].values():
            for nodeid, is_done in unit.items():
                if not is_done:
                    unit[nodeid] = True
                    super().remove_node(node)
                    return str(nodeid)
        super().remove_node(node)
        return None
