"""The names of the tasks of `minikv eval`, without what runs them."""

from __future__ import annotations

CHATS = ("followup", "codes", "back", "long")
ANSWERED = ("needle", "facts", *CHATS, "answers")
MEASURED = ("agree", "kl", "ppl", "loss")
TEXT, RECORDS = ("agree", "kl", "ppl"), ("answers", *MEASURED)
"""What is measured of a FILE."""
TASKS = (*ANSWERED, *MEASURED)
"""Those that --tasks takes; `answers` are those to the records of FILEs."""
