"""Runs parts of the GPU benchmark on a processor, all in this process, which imports what they need once.

``python -m tests.unit.bench.gpu.played_parts.several FOLDER PART...``; a part that raises leaves the traceback there.
"""

import runpy
import sys
import traceback
from pathlib import Path

if __name__ == "__main__":
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for name in names:
        sys.argv = [name, "--cpu", "--out", str(folder / f"{name}.json")]
        try:
            runpy.run_module(f"bench.gpu.{name}", run_name="__main__", alter_sys=True)
        except BaseException:
            (folder / f"{name}.failed").write_text(traceback.format_exc(), encoding="utf-8")
