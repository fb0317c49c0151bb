"""The bus: NATS with JetStream, and an in-process twin, behind one protocol and one conformance suite."""

from shared.bus.protocol import Bus, Delivery, StreamInfo, StreamLimits, StreamMessage, Subscription

__all__ = ["Bus", "Delivery", "StreamInfo", "StreamLimits", "StreamMessage", "Subscription"]
