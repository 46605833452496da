"""The attention of a step: one token over the rows of each head."""
