"""Token ids in, logits or the next token out."""
