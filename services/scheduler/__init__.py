"""Scheduler: the only owner of metadata. A pure core that folds one stream, and a thin shell."""
