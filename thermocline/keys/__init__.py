"""``thermocline keys``: tenants and their API keys, in the file that gateways read."""
