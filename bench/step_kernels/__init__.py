"""How many kernels a step launches, counted without a GPU: whole steps of real models over fake CUDA tensors."""
