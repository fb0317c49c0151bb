"""The scheduler's real core under virtual time, with modelled workers, storage and links."""
