"""Users of the broker: one for each kind of process or for each process, with no more permissions than it needs."""
