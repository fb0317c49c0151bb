"""How often and how lately each prefix was used, on a device or not (HotPrefix 3.2)."""
