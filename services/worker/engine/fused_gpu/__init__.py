"""A faster way to compute a step of a model of the Llama family on a GPU, behind ``ModelRunner.forward``."""
