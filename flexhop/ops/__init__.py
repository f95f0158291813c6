"""The operators: what attention is, and how a graph carries it."""
