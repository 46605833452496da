"""Every operation in plain torch: the specification of the kernels."""
