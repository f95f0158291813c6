"""Many sequences in one buffer: packed and nested."""
