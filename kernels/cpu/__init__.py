"""The kernels of a CPU, in C. `build` compiles them; a module with a C file beside it binds its
functions."""
