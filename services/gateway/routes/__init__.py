"""The endpoints, one family a module; each gives a router for a composed gateway."""
