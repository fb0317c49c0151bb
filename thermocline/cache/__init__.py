"""``thermocline cache``: commands for operators to inspect and change the prefix cache of a running cell."""
