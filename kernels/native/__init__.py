"""Compiles the C sources once, and chooses what C computes on this processor."""
