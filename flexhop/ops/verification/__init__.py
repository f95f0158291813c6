"""Hold a call's results against the reference."""
