"""The kernels of Hopper GPUs, in Gluon: what they serve, constants, and what runs around them."""
