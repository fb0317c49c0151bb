"""Storage: owns the host pool of a node and copies pages between tiers, executing numbered plans."""
