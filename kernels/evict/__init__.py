"""Which rows leave, and where the others move."""
