"""The processes in which Inductor compiles kernels."""
