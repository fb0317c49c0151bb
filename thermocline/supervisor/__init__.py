"""``thermocline up``: starts every process of one cell on this machine, watches, restarts and cleans up.

Pure parts decide: :mod:`restarts` (when to restart), :mod:`commands` (what to run), :mod:`nats_config` (the
broker's settings). :mod:`supervisor` performs. :mod:`api` starts cells for tests and the demo.
"""
