"""``thermocline up``: every process of one cell on this machine, watched, restarted and cleaned up after.

Pure parts decide: :mod:`restarts` (when to restart), :mod:`commands` (what to run), :mod:`nats_config` (the
broker's settings). :mod:`supervisor` performs. :mod:`api` is how tests and the demo use all of it.
"""
