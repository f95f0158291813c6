"""The text that the templates' holes print."""
