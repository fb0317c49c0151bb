"""``thermocline chaos``: a whole cell under load and seeded faults, with a check of every answer.

Pure parts decide: :mod:`plan` (which faults, when), :mod:`workload` (which requests), :mod:`verdicts` (which errors a
fault excuses), :mod:`memory_growth` (what counts as flat). :mod:`cell` runs the processes, :mod:`injection` injects
faults, :mod:`client` asks and compares, :mod:`at_rest` looks for leftovers, and :mod:`run` ties it together.
"""
