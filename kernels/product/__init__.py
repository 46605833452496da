"""Products with plain and packed weights."""
