"""Which model types of the installed transformers are served exactly, and why the others are not."""
