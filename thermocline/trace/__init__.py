"""``thermocline trace``: traces in the Mooncake format, sent to a running cell or made from logs."""
