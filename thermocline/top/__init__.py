"""``thermocline top``: a running cell in a terminal, like the page at /ui in a browser."""
