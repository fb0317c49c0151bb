"""Copies between tiers: loads, promotions, backups, saves, fetches, loans, and the catalogue of disks."""
