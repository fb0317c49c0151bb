"""``thermocline chaos``: a whole cell under load and seeded faults, and proof that nobody noticed.

Pure parts decide: :mod:`plan` (which faults, when), :mod:`workload` (which requests), :mod:`verdicts` (which errors a
fault excuses), :mod:`memory_growth` (what counts as flat). :mod:`cell` runs the processes, :mod:`injection` hurts
them, :mod:`client` asks and compares, :mod:`at_rest` looks for what was left behind, and :mod:`run` ties it together.
"""
