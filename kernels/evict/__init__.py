"""Chooses which rows leave, and moves the others."""
