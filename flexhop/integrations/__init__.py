"""flexhop inside other libraries; each module here is imported by name, when you want it."""
