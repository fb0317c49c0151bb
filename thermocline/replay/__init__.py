"""``thermocline replay``: fold a recording again, or ask what would have been under other settings."""
