"""Kernels as Inductor choices: fill templates, launch them, and emit the work around them."""
