"""The kernels of a CPU in C. `build` compiles them; the other modules bind them to tensors."""
