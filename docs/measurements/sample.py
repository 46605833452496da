"""Write the sample document and its questions: `python docs/measurements/sample.py`.

A document of about 7,000 tokens that the model was not trained on (another seed), and one question
of every kind of fact in it.
"""

from __future__ import annotations

import json
import random

from minikv.models import BUNDLED
from minikv.models.bundled import world

SEED, SENTENCES, FACTS = 20_000_001, 560, 36


def main() -> None:
    rng = random.Random(SEED)
    doc = world.document(rng, SENTENCES, FACTS)
    order = list(doc.facts)
    rng.shuffle(order)
    questions = [{"question": rng.choice(f.questions), "answer": f.answer} for f in order[:12]]
    (BUNDLED / "sample.txt").write_text(doc.text + "\n")
    (BUNDLED / "questions.json").write_text(json.dumps(questions, indent=1) + "\n")


if __name__ == "__main__":
    main()
