"""The scheduler's real core under virtual time, with modelled workers, storage and links (DESIGN, section 2)."""
