"""Kernels in Inductor: templates, printed functions, machine code, launchers."""
