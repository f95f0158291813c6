"""A fake GPU, and Inductor's wrappers on CPU tensors."""
