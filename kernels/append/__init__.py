"""A new row takes its place in the cache."""
