"""The kernels of NVIDIA's GPUs, in Triton."""
