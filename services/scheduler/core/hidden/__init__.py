"""Hidden states: their pages, saves, fetches and leases, and when KV is restored from them."""
