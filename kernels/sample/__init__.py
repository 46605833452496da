"""Draws the next token."""
