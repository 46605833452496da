"""The names of the tasks of `minikv eval`, without what runs them."""

from __future__ import annotations

CHATS = ("followup", "codes", "back", "interview", "lists", "passage")
ANSWERED = ("needle", "facts", *CHATS, "file")
MEASURED = ("agree", "ppl", "loss")
TASKS = (*ANSWERED[:-1], *MEASURED)
"""Those that --tasks takes; records from files are a task of their own."""
