"""flexhop inside other libraries. Import each module by name when you need it."""
