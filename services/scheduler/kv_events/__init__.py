"""What the cell has cached, told to routers outside of it in the messages of vLLM's KV events over ZeroMQ."""
