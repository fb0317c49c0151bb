"""The second form of KV chunks on the disk, which can be read in parts (IMPRESS 4.3, 4.4.1)."""
