"""Reports on calls: explain says what would run, verify checks what did."""
