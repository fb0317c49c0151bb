"""``thermocline eval``: how much quality a model loses when only a part of a shared prefix is loaded."""
