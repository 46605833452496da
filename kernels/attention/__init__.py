"""The attention of a prompt."""
