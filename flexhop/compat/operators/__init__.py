"""Operators of our own: their class, dispatch, transforms, and calls compiled alone."""
