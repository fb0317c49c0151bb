"""Charts as SVG text, without a library: for pages, notebooks and the figures of commands."""
