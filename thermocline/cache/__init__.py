"""``thermocline cache``: look at the prefix cache of a running cell, and empty it."""
