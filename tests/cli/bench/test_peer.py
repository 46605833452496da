"""Systems in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.bench import models, peer, shapes
from minikv.cli.bench.cached import Cached
from minikv.errors import MemoryShortError

TINY = shapes.find("tiny")
FULL = EvictionConfig.read("full", "none")


def test_a_process_measures_and_says_what_went_wrong() -> None:
    made = peer.Process("minikv", peer.minikv, models.Spec(TINY), 1, FULL)
    try:
        assert made.read(range(128)) > 0
        assert made.write(2) > 0
        assert made.peak() > 50 << 20
        with pytest.raises(peer.PeerError, match=r"minikv: ValueError: a prompt needs"):
            made.read(range(0))
        assert made.write(1) > 0  # and goes on
        made._process.kill()
        with pytest.raises(MemoryShortError, match="minikv was killed"):
            made.read(range(128))
        assert not made.alive
    finally:
        made.close()


_STAYS = """
from minikv.chat.eviction_config import EvictionConfig
from minikv.cli.bench import models, peer, shapes
spec, full = models.Spec(shapes.find("tiny")), EvictionConfig.read("full", "none")
made = peer.Process("minikv", peer.minikv, spec, 1, full)
print(made._process.pid, flush=True)
import time; time.sleep(600)
"""


def test_a_process_ends_with_the_one_that_started_it() -> None:
    with subprocess.Popen([sys.executable, "-c", _STAYS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
    for _ in range(100):
        if not _alive(child):
            break
        time.sleep(0.1)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be asked does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.skipif(not peer.installed(), reason="transformers is not there")
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_computes_with_the_same_weights(tied: bool) -> None:
    sizes = shapes.Sizes(2, 64, 4, 2, 16, 128, 256, tied=tied)
    spec = models.Spec(sizes, dtype="float32")
    theirs, ours = peer.Transformers(spec), Cached(models.network(spec), FULL)
    ids = models.prompt(70, TINY.vocab)
    with torch.inference_mode():
        logits = theirs.model(torch.tensor([ids])).logits[0, -1]
    assert torch.allclose(ours.engine.prompt(ids), logits, atol=1e-5)
    theirs.read(ids)
    theirs.write(3)
    assert theirs._cache.get_seq_length() == 73
    ours.read(ids)
    ours.write(3)
    assert ours._token == int(theirs._token)  # greedy both
