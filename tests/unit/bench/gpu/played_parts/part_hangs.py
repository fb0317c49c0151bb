"""A part that finds something, and then never ends, whoever asks it to; it does without PyTorch too."""

import signal
import sys
from pathlib import Path

from bench import results_file

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = Path(sys.argv[sys.argv.index("--out") + 1])
    results_file.write("gpu_part_hangs", {"found": 1, "is_whole": False}, seed=0, out=out)
    print("it hangs", flush=True)
    while True:
        signal.pause()
