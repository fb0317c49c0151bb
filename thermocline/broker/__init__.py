"""Users of the broker: one for each kind of process or for each process, each with what it needs and nothing else."""
