"""Drive a running system with the structure of a recorded production trace (Mooncake format)."""
