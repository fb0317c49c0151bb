"""A small streaming client that measures; the demo and the trace driver use it."""

from thermocline.client.connecting import connect
from thermocline.client.stream import Answer, RequestError, served_model, stream_answer

__all__ = ["Answer", "RequestError", "connect", "served_model", "stream_answer"]
