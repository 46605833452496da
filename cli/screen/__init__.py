"""What a person sees and types: the terminal, its keys, Markdown, progress and strips."""
