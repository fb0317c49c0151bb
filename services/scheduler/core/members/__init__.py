"""Workers and storages that join, leave, drain and hand over."""
