"""The live page at /ui: static files and the route that serves them. It sees only what the HTTP API gives it."""
