"""User functions: how they become graphs, and what such graphs must not do."""
