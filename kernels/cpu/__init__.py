"""The kernels of a CPU, in C. `build` compiles them; the Python module with the name of a C file
calls its functions."""
