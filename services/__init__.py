"""The four kinds of process. They never import one another; they meet on the bus."""
