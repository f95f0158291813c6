"""Derivatives of any order, as an operator of their own."""
