"""Quotas: how many bytes the KV of one owner may take in each pool and on disks."""
