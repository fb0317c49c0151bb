"""Tensor parallelism: one worker is a group of processes, its ranks, each with a share of every layer.

Rank 0 is the worker itself. It talks to the cell, decides, moves KV and samples. The other ranks are its children: they
carry out the numbered steps that it sends them (``orders``), synchronised with it by collectives and, within a step, by
messages that say what is loaded and chosen. The cell sees one worker with one device pool, whose page p is page p of
every rank's part.
"""
