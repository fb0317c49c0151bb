"""What long prompts cost of which all but the end is cached, sessions that grow, and the fixed part of a request."""
