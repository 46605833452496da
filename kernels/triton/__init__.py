"""The kernels of a GPU, in Triton."""
