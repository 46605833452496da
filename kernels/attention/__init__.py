"""A prompt's attention."""
