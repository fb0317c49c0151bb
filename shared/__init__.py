"""Code that every Thermocline process shares: identities, errors, messages, codec, bus, memory handles.

Nothing here imports a service, and nothing outside ``shared.bus`` imports nats.
"""
