"""A process in front of several cells that distributes requests over them by the heads of their prompts (ADR 0035)."""
