"""A part that finds something, and then never ends, whoever asks it to."""

import signal

from bench.gpu import reading

if __name__ == "__main__":
    run = reading.begin("part_hangs", __doc__)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run.keep({"found": 1})
    print("it hangs", flush=True)
    while True:
        signal.pause()
