"""The worker's C code, and the modules that call it.

These are ``decode``, ``extend``, ``fused`` and ``page_rows``, each beside its C file. :mod:`build` compiles them.
"""
