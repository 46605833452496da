"""Writes a new row to the cache."""
