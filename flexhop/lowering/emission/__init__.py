"""Kernels as Inductor's choices: templates filled, launched, and what is done around them."""
