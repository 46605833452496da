"""Mutated files for every reader, in one process and without a model.

A `Target` has good files and a reader. A mutation changes bytes, or a value of the parsed JSON; a
checksum that guards a file is made to fit again, because anyone can do that. The reader may take
what it gets or refuse it by the errors that it documents. Anything else is a finding, as is more
than two seconds of processor time. `tests/test_fuzz.py` runs it.
"""

from __future__ import annotations

import base64
import copy
import json
import random
import resource
import sqlite3
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ggufs
import test_config
import torch
import vocabularies as v
from checkpoints import Spec
from quantising import FORMS
from safetensors.torch import save
from small_chat import chat, say
from sqlite_calls import edit, edit_facts

from minikv.cache.tier_file import FileRows, Header, sealed
from minikv.cache.tier_rows import TierError
from minikv.cli.chat import kept
from minikv.cli.eval.items import read_items
from minikv.cli.saved.keeper import Keeper
from minikv.cli.saved.listing import damage, listing
from minikv.cli.saved.transcript import held, read_cache, read_from, resumed
from minikv.cli.screen.editor import HistoryFile
from minikv.cli.screen.terminal import Terminal
from minikv.cli.settings import config as settings
from minikv.errors import UsageError
from minikv.models.checkpoint import read_header
from minikv.models.config import ModelConfig
from minikv.models.errors import ModelError
from minikv.models.files import parse_json, weight_map
from minikv.models.gguf import Gguf
from minikv.models.quantised import Matrix, stored
from minikv.models.templates import _own_template
from minikv.models.tokenizer import Tokenizer
from minikv.settings import Settings

SECONDS = 2.0
GROWTH = 512 << 20  # bytes by which the peak of this process may grow with one input


@dataclass(frozen=True)
class Target:
    """One kind of file. `seeds`: good ones. `read(data)` writes and reads one. `share`: how much of
    a run it gets. `tree`: the seeds are JSON. `refusals`: what it may raise."""

    name: str
    seeds: tuple[bytes, ...]
    read: Callable[[bytes], object]
    share: float = 1.0
    tree: bool = True
    lines: bool = False
    refusals: tuple[type[BaseException], ...] = (ModelError,)


@dataclass
class Outcome:
    """What a run found. `findings`: a line, and the input in base64."""

    tried: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[str, str]] = field(default_factory=list)


# -- mutations ------------------------------------------------------------------------------------

_ODD: tuple[Any, ...] = (
    *json.loads(
        """[null, true, false, 0, -1, 1, 2, 3.5, -0.0, 1e308, 2147483648, 9007199254740993,
        9223372036854775808, 1000000000000000000000000000000, -10000000000000000000000000,
        "", "a", "\\u0000", "\\ud800", "\\u001b[31m", "../x", "/etc/passwd", "NaN",
        [], {}, [[]], [null], [1, "a"], {"": null}, {"a": {"b": []}}, [[[[[[]]]]]]]"""
    ),
    "é" * 300,
    "x" * 5000,
    [0] * 300,
)
_TEXTS = (
    *b"""1e999 -1e999 NaN Infinity 1e-400 null {} [] "" \\ud800 \\u0000 , : } " true
    18446744073709551616 # = [[x]] \'\'\'""".split(),
    *(b"9" * 400, b"9" * 5000, b"[" * 2000, b"[" * 1500 + b"]" * 1500, b'{"a":' * 1200),
    *(b"\xff\xfe", b"\xef\xbb\xbf", b"\x00", b"\n", b"\r\n", b"\xe2\x80\xa8"),
)


def mutated(draw: random.Random, target: Target) -> bytes:
    """A seed with one to four changes."""
    data = draw.choice(target.seeds)
    if target.tree and draw.random() < 0.6:
        return _tree(draw, data, target.lines)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        data = _bytes(draw, data)
    return data


def _bytes(draw: random.Random, data: bytes) -> bytes:
    """Some bytes leave, and others come in their place; one in ten times the file ends there."""
    at, other = draw.randrange(len(data) + 1), draw.randrange(len(data) + 1)
    end = min(len(data), at + draw.choice((0, 1, 1, 2, 4, 16, 200)))
    new = (
        *(draw.randbytes(end - at), draw.randbytes(1), b"", draw.choice(_TEXTS)),
        *(data[at:end] * draw.choice((2, 3, 50)), data[other : other + end - at]),
    )
    return data[:at] + draw.choice(new) + (b"" if draw.random() < 0.1 else data[end:])


def _tree(draw: random.Random, data: bytes, lines: bool) -> bytes:
    if lines:
        rows = data.splitlines(keepends=True)
        at = draw.randrange(len(rows))
        rows[at] = _tree(draw, rows[at], False) + b"\n"
        if draw.random() < 0.1:
            rows.insert(draw.randrange(len(rows)), draw.choice(rows))
        return b"".join(rows)
    top = [json.loads(data)]
    for _ in range(draw.choice((1, 1, 2, 3))):
        places = list(_places(top))
        if not places:
            break
        holder, key = draw.choice(places)
        kind = draw.randrange(6)
        if kind <= 2:
            holder[key] = copy.deepcopy(draw.choice(_ODD))
        elif kind == 3 and isinstance(holder, dict):
            holder[draw.choice(("", "type", "x" * 90, "\ud800", "a b"))] = holder.pop(key)
        elif kind == 4 and len(top) > 0 and holder is not top:
            del holder[key]
        else:
            other, name = draw.choice(places)
            holder[key] = json.loads(json.dumps(other[name]))
    # allow_nan: what Python's own writer would let through.
    return json.dumps(top[0]).encode("utf-8", "surrogatepass")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (list or object, index or key) in a value."""
    stack, count = [value], 0
    while stack and count < 3000:
        holder = stack.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            count += 1
            yield holder, key
            if isinstance(holder[key], dict | list):
                stack.append(holder[key])


# -- running --------------------------------------------------------------------------------------


def run(targets: list[Target], count: int, seed: int) -> Outcome:
    """`count` inputs over all targets, by their shares. The same seed makes the same inputs."""
    found = Outcome()
    whole = sum(target.share for target in targets)
    for target in targets:
        draw = random.Random(f"{seed} {target.name}")
        target.read(target.seeds[0])  # it is read: what is refused is what was changed
        for _ in range(max(1, round(count * target.share / whole))):
            _one(target, mutated(draw, target), found)
    return found


def _one(target: Target, data: bytes, found: Outcome) -> None:
    found.tried[target.name] += 1
    peak, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    line = ""
    try:
        target.read(data)
    except target.refusals as error:
        found.refused[target.name] += 1
        if "\n" in str(error) or not str(error).isprintable():
            line = f"a line that is none: {str(error)!r:.200}"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        line = f"{type(error).__name__}: {str(error)!r:.120} ({place})"
    took = time.process_time() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
    if took > SECONDS:
        line = f"{took:.1f} seconds"
    if grown > GROWTH:
        line = f"{grown >> 20} MiB"
    if line:
        found.findings.append((f"{target.name}: {line}", base64.b64encode(data).decode()))


# -- the readers ----------------------------------------------------------------------------------


def targets(folder: Path) -> list[Target]:
    """All of them; they write below `folder`, which must also be MINIKV_HOME."""
    return [
        *_models(folder / "model"),
        _quantised(folder / "quantised"),
        *_tokenizers(folder / "tokenizer"),
        *_chats(folder),
        *_texts(folder / "texts"),
    ]


def _putting(path: Path, read: Callable[[], object]) -> Callable[[bytes], object]:
    def one(data: bytes) -> object:
        path.write_bytes(data)
        return read()

    path.parent.mkdir(parents=True, exist_ok=True)
    return one


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _models(folder: Path) -> list[Target]:
    def entry(start: int, end: int, shape: list[int]) -> dict[str, Any]:
        return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}

    header = {"__metadata__": {"format": "pt"}, "a.weight": entry(0, 8, [2])}
    header |= {"b.weight": entry(8, 24, [2, 2]), "c": entry(24, 24, [0])}

    def framed(data: bytes) -> bytes:
        return len(data).to_bytes(8, "little") + data + bytes(24)

    shards = {f"layer.{i}": f"model-0000{i % 3}-of-00003.safetensors" for i in range(9)}
    index = {"metadata": {"total_size": 123}, "weight_map": shards}
    llama, yarn = test_config.LLAMA, {"rope_type": "yarn", "factor": 4.0}
    configs = (
        *(llama, test_config.MISTRAL, test_config.QWEN, test_config.MISTRAL3),
        *test_config.OTHERS.values(),
        llama | {"rope_scaling": test_config.LLAMA3},
        llama | {"rope_scaling": yarn, "max_position_embeddings": 512},
        llama | {"quantization_config": {"quant_method": "gptq"}, "auto_map": {}},
    )
    generation = b'{"eos_token_id": [1, 2], "temperature": 0.6, "do_sample": true}'

    def configured(name: str) -> Callable[[bytes], object]:
        """What is accepted can be computed with."""

        def sound() -> None:
            config = ModelConfig.from_folder((folder / name).parent)
            assert config.heads % config.kv_heads == config.head_dim % 2 == 0
            assert len(config.windows) == config.layers
            assert all(window is None or window > 0 for window in config.windows)
            assert config.max_context > 0
            assert config.rope.theta >= 1

        return _putting(folder / name, sound)

    configured("other/config.json")  # makes the folder
    (folder / "other/config.json").write_bytes(_json(llama))
    whole = ggufs.model(folder / "gguf", Spec(hidden=32, heads=2, kv_heads=1, vocab=110, layers=1))
    gguf = whole.read_bytes()
    weights = gguf.rindex(b"output_norm.weight") + 64  # nothing reads them

    def read() -> object:
        made = Gguf(folder / "fuzz.gguf")
        return made.checkpoint().dtype, made.template(made.tokenizer(made.config()))

    def spanned() -> None:
        """The tensors of a header that is accepted fill the file."""
        file = folder / "model.safetensors"
        spans = sorted((e.start, e.start + e.size) for e in read_header(file).values())
        start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        assert [start, *(end for _, end in spans)] == [*(at for at, _ in spans), spans[-1][1]]
        assert spans[-1][1] == file.stat().st_size

    shard = _putting(folder / "model.safetensors", spanned)
    mapped = _putting(folder / "i.json", lambda: weight_map(folder / "i.json"))
    blank = gguf[:weights] + bytes(len(gguf) - weights)
    return [
        Target("header", (_json(header),), lambda d: shard(framed(d))),
        Target("gguf", (blank,), _putting(folder / "fuzz.gguf", read), tree=False),
        Target("header's bytes", (framed(_json(header)),), shard, tree=False),
        Target("index", (_json(index),), mapped),
        Target("config", tuple(map(_json, configs)), configured("hf/config.json"), 3),
        Target("params", (_json(test_config.PARAMS),), configured("own/params.json")),
        Target("generation_config", (generation,), configured("other/generation_config.json")),
    ]


def _quantised(folder: Path) -> Target:
    """One quantised matrix with its settings as JSON: {"config": .., "parts": {name: [dtype, shape,
    bytes as Latin-1]}}. The file is made from it, with as many bytes as the shapes ask for."""
    sizes = {"F32": 4, "I32": 4, "F16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1}
    folder.mkdir(parents=True)
    file, config = folder / "m.safetensors", folder / "config.json"

    def seed(name: str) -> bytes:
        made, _ = FORMS[name].write(32, 64, torch.Generator().manual_seed(1))
        file.write_bytes(save({f"m.{tail}": part for tail, part in made.items()}))
        data = file.read_bytes()
        parts = {
            name[2:]: [e.dtype, list(e.shape), data[e.start :][: e.size].decode("latin-1")]
            for name, e in read_header(file).items()
        }
        return _json({"config": FORMS[name].config, "parts": parts})

    def read(data: bytes) -> None:
        value = parse_json(data, "seed")
        parts, header, body = value.get("parts"), dict[str, Any](), b""
        for tail, part in parts.items() if isinstance(parts, dict) else ():
            dtype, shape, text = [*part, 0, 0, 0][:3] if isinstance(part, list) else (part, [], "")
            content, count = str(text).encode("latin-1", "replace"), sizes.get(str(dtype), 8)
            for size in shape if isinstance(shape, list) else ():
                count *= size if isinstance(size, int) and 0 <= size < 1 << 12 else 1
            count = min(count, 1 << 20)
            spans = [len(body), len(body) + count]
            header[f"m.{tail}"] = {"dtype": dtype, "shape": shape, "data_offsets": spans}
            body += content[:count].ljust(count, b"<")
        raw = _json(header)
        file.write_bytes(len(raw).to_bytes(8, "little") + raw + body)
        config.write_bytes(_json(test_config.LLAMA | {"quantization_config": value.get("config")}))
        about = ModelConfig.from_folder(folder).quantisation
        if about is None:
            return
        for one in stored(read_header(file), about, {"m.weight": (32, 64)}).values():
            if isinstance(one, Matrix):
                made = one.rows(0, 32) if one.form == "plain" else one.steps(0, 32)[1]
                assert len(made) == 32

    names = ("awq", "gptq desc_act", "fp8 blocks", "nf4 nested", "llm.int8")
    return Target("quantised", tuple(map(seed, names)), read)


def _tokenizers(folder: Path) -> list[Target]:
    small = v.byte_level_json(entries=270, count=8)
    pieces = v.vendor_file("v1").read_bytes()
    starts = [0]
    while pieces[starts[-1]] == 0x0A:  # a tag byte, a length byte and that many bytes
        starts.append(starts[-1] + 2 + pieces[starts[-1] + 1])
    short = pieces[: starts[700]] + pieces[starts[-1] :]

    def spoken(place: Path) -> object:
        tokenizer = Tokenizer.from_folder(place)
        ids = tokenizer.encode("Hello [INST] wörld <|eot_id|>")
        _own_template(place)
        return tokenizer.decode(ids), tokenizer.split("<s>[INST] a</s>"), tokenizer.largest

    config = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": {"content": "<|eot_id|>", "lstrip": False},
        "additional_special_tokens": ["<|eom_id|>", {"content": "<|x|>"}],
        "added_tokens_decoder": {"300": {"content": "<|y|>", "special": True}},
        **{"add_bos_token": True, "legacy": False},
        "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    }
    marks = {"bos_token": {"content": "<s>"}, "additional_special_tokens": ["<|eom_id|>"]}
    made = []
    for name, seed, share in (
        ("tokenizer.json", _json(small), 1.0),
        ("tokenizer_config.json", _json(config), 1.0),
        ("special_tokens_map.json", _json(marks), 0.5),
        ("added_tokens.json", b'{"<|y|>": 300, "<|z|>": 301}', 0.5),
        ("chat_template.json", b'{"chat_template": "{{ messages }}"}', 0.5),
        ("tokenizer.model", short, 0.3),
        ("tekken.json", _json(v.tekken(270)), 0.5),
    ):
        place = folder / name
        read = _putting(place / name, lambda place=place: spoken(place))
        if name not in ("tokenizer.json", "tokenizer.model", "tekken.json"):
            v.write_folder(place, small)
        made.append(Target(name, (seed,), read, share, name != "tokenizer.model"))
    return made


def _chats(folder: Path) -> list[Target]:
    session, keeper = chat(system="be brief", seed=4), Keeper(Terminal())
    session.attach("A mill stands by the river. " * 8, "mill.txt")
    say(session, "Who owns it?")
    say(session, "Why?")
    session.attach("waiting", "w.txt")
    place = keeper.save(session, "one") / "chat.db"
    keeper.close()
    whole = place.read_bytes()
    with closing(sqlite3.connect(place)) as db:
        ((facts,),) = db.execute("SELECT facts FROM chat")
        ((turn,),) = db.execute("SELECT facts FROM turn WHERE number = 0")
        ((cache,),) = db.execute("SELECT data FROM cache")

    def database(data: bytes) -> None:
        """Read as by `minikv chats` and `Keeper.load`."""
        for name in ("chat.db-journal", "chat.db-wal", "chat.db-shm"):
            (place.parent / name).unlink(missing_ok=True)
        place.write_bytes(data)
        used()

    def used() -> None:
        listing()
        resumed(Settings(), "one", ())
        with closing(held("one")) as file, damage("one"):
            found = read_from("one", file.rows)
            session.restore(read_cache(file.rows, found, session.engine.kv))
        kept.held(session)
        for one in found.turns:
            one.report.lines()
            one.report.to_dict()

    def row(table: str) -> Callable[[bytes], None]:
        def one(data: bytes) -> None:
            place.write_bytes(whole)
            value = data if table == "cache" else data.decode("utf-8", "replace")
            edit(place, table, lambda values: values.__setitem__(0, value))
            if table == "cache":
                edit_facts(place, "chat", lambda facts: facts.update(cache=len(data)))
            used()

        return one

    record = row("cache")

    def state(data: bytes) -> None:
        """The cache's own header, in a file that is whole."""
        record(len(data).to_bytes(8, "little") + data + cache[8 + length :])

    length = int.from_bytes(cache[:8], "little")
    top = json.loads(cache[8 : 8 + length])

    def inside(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        state(_json(top | {"__metadata__": {**top["__metadata__"], "state": text}}))

    tier = folder / "tier.kv"
    made = FileRows.create(tier, Header(2, 2, {"k": (torch.float32, (8,))}, {"model": "x"}))
    made.kept = True
    made.reserve(8, 0)
    for layer in range(2):
        made.write(layer, 0, {"k": made.read(layer, 8)["k"][:, :8]})
    made.commit(8, list(range(8)))
    made.close()
    stated_tier = (tier / "manifest").read_bytes().split(b"\n", 1)[1]

    def manifest(data: bytes) -> None:
        """With a checksum that fits."""
        (tier / "manifest").write_bytes(sealed(data))
        FileRows.open(tier).close()

    usage = (UsageError,)
    inner = top["__metadata__"]["state"].encode()
    return [
        Target("chat.db", (whole,), database, tree=False, refusals=usage),
        Target("a chat's facts", (facts.encode(),), row("chat"), 0.5, refusals=usage),
        Target("a turn's facts", (turn.encode(),), row("turn"), 0.5, refusals=usage),
        Target("a chat's cache", (cache,), record, 0.3, tree=False, refusals=usage),
        Target("its header", (cache[8 : 8 + length],), state, 0.5, refusals=usage),
        Target("its state", (inner,), inside, 0.5, refusals=usage),
        Target("a tier's manifest", (stated_tier,), manifest, 0.3, refusals=(TierError,)),
    ]


def _texts(folder: Path) -> list[Target]:
    toml = (
        b'budget = "20%"\ntemperature = 0.7\nseed = 7\npolicy = "adakv"\nquiet = true\n'
        b'stop = ["a", "b"]\nmodel = "fast"\nthreads = 2\n'
        b'[aliases]\nfast = "owner/model"\n'
    )
    asked = {"input": "A key is 17.\nWhat is it?", "outputs": ["17"], "answer_prefix": "It is"}
    history = b"\n# a date\n+a\n+b c\n\n# another\n+\xc3\xa9\n"
    usage = (UsageError,)

    records, typed = folder / "niah_1.jsonl", HistoryFile(folder / "history")
    loaded = _putting(folder / "minikv.toml", lambda: settings.load({}, folder))
    items = _putting(records, lambda: list(read_items(records)))
    lines = _putting(folder / "history", lambda: list(typed.load_history_strings()))
    return [
        Target("minikv.toml", (toml,), loaded, 2, tree=False, refusals=usage),
        Target("records", (_json(asked) + b"\n",), items, lines=True, refusals=usage),
        Target("history", (history,), lines, 0.3, tree=False, refusals=()),
    ]
