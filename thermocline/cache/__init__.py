"""``thermocline cache``: what operators see of the prefix cache of a running cell, and what they can do to it."""
