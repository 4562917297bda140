"""Sources: what a trainer holds and how it exports it."""
