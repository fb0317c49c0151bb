"""Worker: runs the model over a paged KV pool, executing numbered plans."""
