"""The demo: many questions over shared documents that do not fit in device KV, with caching and without."""
