"""A step's attention: one token against the rows of each head."""
