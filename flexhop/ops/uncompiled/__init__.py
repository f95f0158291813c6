"""Kernels for calls outside torch.compile."""
