"""What each target of GPU speed should come to, by arithmetic over datasheets, until a GPU has measured it.

Bytes, products and kernels are counted for Llama-3.1-8B in bfloat16; devices are those of the simulator's profiles
(``thermocline/simulate/profiles/hardware``), whose efficiencies are assumptions, and the constants of these modules,
which are assumptions too. Where ``bench/results/gpu.json`` has a figure of a GPU, it stands beside the estimate, marked
as measured, for the device that it names.
"""
