"""What the holes of the templates print."""
