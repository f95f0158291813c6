"""Keys and values that lie elsewhere: pages and caches."""
