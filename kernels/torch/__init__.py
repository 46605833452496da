"""Every operation in plain torch: the specification of the C and Triton kernels."""
