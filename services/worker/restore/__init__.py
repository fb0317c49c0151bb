"""Restoring KV from hidden states: smaller than KV where every head has its own K and V, and cheap to turn into it.

Saving: :mod:`attention_inputs` sees the inputs of attention, :mod:`two_stage` copies them to the host within the step
and assembles pieces of 64 tokens beside it, which :mod:`leased_pages` writes to :mod:`hidden_pools`. Restoring:
:mod:`restoration` brings them to the device layer by layer, read and verified by :mod:`hidden_page_source`, while
:mod:`projection` turns the layer before into KV. :mod:`profile` measures the cost of each means, :mod:`measured_costs`
gives it to the planner. After HCache (Gao, Chen and Shu, "Fast State Restoration in LLM Serving with HCache", EuroSys
2025).
"""
