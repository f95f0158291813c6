"""The operators: the reference implementation of attention, and its form in graphs."""
