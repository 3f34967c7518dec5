"""Long-context tasks: one file for each family."""
