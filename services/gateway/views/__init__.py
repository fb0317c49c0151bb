"""From assembled tokens to response bodies and stream chunks. Pure."""
