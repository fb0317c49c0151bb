"""A process in front of several cells: it spreads requests over them by the heads of their prompts (ADR 0035)."""
