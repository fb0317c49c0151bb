"""A part that finds something, and then fails."""

from bench.gpu import reading

if __name__ == "__main__":
    run = reading.begin("part_fails", __doc__)
    run.keep({"found": 1})
    raise RuntimeError("the device fell off the bus")
