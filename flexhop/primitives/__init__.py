"""Small operators that mods call."""
