"""The names of the tasks of `minikv eval`, without what runs them."""

from __future__ import annotations

CHATS = ("followup", "long")
ANSWERED = ("needle", "facts", *CHATS, "answers")
BESIDE = ("agree", "kl", "ppl")
"""What is measured beside the full cache, of questions and of texts."""
TASKS = (*ANSWERED, *BESIDE)
"""Those that --tasks takes; `answers` are those to the records of FILEs."""
