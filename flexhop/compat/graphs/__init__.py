"""Graphs that Inductor lowers: formulas in place, shared parts, views, second attempts."""
