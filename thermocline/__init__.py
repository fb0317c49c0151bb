"""The thermocline command: starts processes, records, replays, measures."""
