"""The kernels in portable Triton: tiles, constants, shares of keys, caches."""
