"""Policies and schedules of the literature, to compare with. The package above imports and so registers them."""
