"""``thermocline top``: a running cell in a terminal, as the page at /ui shows it in a browser."""
