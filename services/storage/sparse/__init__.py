"""The second form of KV chunks on the disk, of which parts can be read (IMPRESS 4.3, 4.4.1)."""
