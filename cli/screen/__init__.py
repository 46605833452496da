"""The terminal: output, keys, Markdown, progress and strips."""
