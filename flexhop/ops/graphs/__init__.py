"""User functions as FX graphs: traced, read, and split into tables."""
