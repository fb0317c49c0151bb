"""The fold: the loop over inputs, their handlers, settings, snapshots, status and invariants."""
