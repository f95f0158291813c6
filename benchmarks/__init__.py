"""Speed of flexhop against in-tree FlexAttention and SDPA: ``python -m benchmarks``."""
