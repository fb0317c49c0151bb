"""Distribution of files of tests over processes in which a test that ended its process is not run again."""

from __future__ import annotations

from xdist.scheduler.loadfile import LoadFileScheduling
from xdist.workermanage import WorkerController


class EachTestOnce(LoadFileScheduling):
    """``--dist loadfile``, with two faults of xdist's mended, which show when a test ends its process.

    xdist would hand that test to one process after another. And it would queue all files that the process had, those
    that were done included: each is given to a process that ends a test, and when tests are over before files are, all
    processes wait for another that never comes.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Take a process out and queue the rest of its files; the test in which it ended, None if it had done all."""
        work = self.assigned_work[node]
        ended_in = next((nodeid for unit in work.values() for nodeid, is_done in unit.items() if not is_done), None)
        for unit in work.values():
            if ended_in in unit:
                unit[ended_in] = True
        self.assigned_work[node] = {file: unit for file, unit in work.items() if not all(unit.values())}
        super().remove_node(node)
        return ended_in
