"""``thermocline replay``: fold a recording again, or simulate it under other settings."""
