"""Small operators of our own that mods call."""
