"""The live page at /ui: static files and the routes that serve them. It uses only the HTTP API."""
