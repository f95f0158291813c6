"""What would happen to a call, in words and numbers; computes nothing."""
