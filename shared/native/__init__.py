"""C code that more than one service calls, and :mod:`build`, which compiles the C files of all services."""
