"""minikv as a process: pipes, closed and full streams, and the commands that need no model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import Piped, run
from processes import python
from tables import table
from typed import answer_of, fails, invoke

import minikv
from minikv.cli import main
from minikv.policies import method_names, prompt_names, read_options, registry, step_names

FAKE = Path(__file__).parents[1] / "support" / "fake_main.py"
SAID = answer_of("The mill is run by Ada.", "q", 40)


def shell(
    script: str, *arguments: str, input: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """A script around `"$@"`, which is minikv."""
    command = ["sh", "-c", script, "sh", sys.executable, str(FAKE), "0", *arguments]
    env = {**os.environ, **env}
    return subprocess.run(command, env=env, input=input, capture_output=True, text=True, timeout=60)


def test_a_loop_over_lines_gets_every_line(document: str) -> None:
    """Each question leaves what follows on standard input to the next."""
    script = 'read -r line; "$@" "$line" "$FILE" && cat'
    done = shell(script, "ask", "-q", input="q\ntwo?\nthree?\n", FILE=document)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [SAID, "two?", "three?"]


def test_an_open_pipe_does_not_make_it_wait_and_a_broken_one_ends_it_quietly(document: str) -> None:
    with Piped("ask", "q", document, pace=0) as process:
        assert process.wait() == 0  # nobody has closed its standard input
        assert process.stdout.read() != b""
    with Piped("ask", "q", document, "-q", pace=0.01) as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait() == 0
        assert process.stderr.read() == b""


def test_an_answer_needs_neither_stderr_nor_stdin(document: str) -> None:
    closed = shell('exec "$@" 2>&- <&-', "ask", "q", document, "--stats")
    assert (closed.returncode, closed.stdout) == (0, f"{SAID}\n")
    for words, code, out in ((("q", document), 0, f"{SAID}\n"), (("q", f"{document}.not"), 2, "")):
        done = run("ask", *words, "--stats", errors="/dev/full", pace=0)
        assert (done.code, done.out) == (code, out)


@pytest.mark.parametrize("words", ["ask q FILE -q", "policies", "--version", "--help"])
def test_output_that_cannot_be_written_is_an_error_and_no_bug(document: str, words: str) -> None:
    done = run(*words.replace("FILE", document).split(), output="/dev/full", pace=0)
    error = "error: cannot write the output:"
    assert (done.code, done.err) == (1, f"{error} No space left on device\n")
    if words == "--help":
        closed = shell('exec "$@" >&-', words)
        assert (closed.returncode, closed.stderr) == (1, f"{error} Bad file descriptor\n")


@pytest.mark.parametrize("words", ["--help", "plan --help-all", "--version"])
def test_help_whose_reader_has_left_is_no_error(words: str) -> None:
    done = shell('{ sleep 0.2; "$@"; echo $? >&2; } | true', *words.split())
    assert done.stderr == "0\n"


@pytest.mark.parametrize("module", ["minikv", "minikv.cli"])
def test_ctrl_c_while_python_imports_is_quiet(module: str, tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    done = python("-m", module, "--version", folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (130, "")


# -- without a model ------------------------------------------------------------------------
@table("""
    words                        | says
    ask q --quality 1            | error: --quality is gone: choose --budget; the record
    chat --preset many-questions | error: --preset is gone: --policy kvzip
    chat --reread-limit=3        | error: --reread-limit is gone: --reuse once reads
    eval --csv x                 | error: --csv is gone: --json has every figure
    verify -m x                  | error: verify is gone: hf cache verify NAME
    config path                  | error: path is gone: `minikv config show` says which file
    policies show h2o --json     | error: --json is gone: `minikv policies show NAME`
    doctor --json                | error: --json is gone: `minikv doctor` prints a line for each
    cache --json                 | error: --json is gone: `minikv cache` prints
    chats --json                 | error: --json is gone: `minikv chats` prints one line for each
    chats show one --json        | error: --json is gone: minikv chat --resume NAME, then /export
    models --json                | error: --json is gone: `minikv models` prints one line for each
    bench kernels                | error: kernels is gone: `minikv bench decode` and
    bench --model x              | error: --model is gone: --shape takes the sizes
    bench nonsense               | error: Invalid value for 'decode|prefill|all': 'nonsense' is
    report chat.json             | error: report is gone: minikv chat --resume NAME, then
    ask q --xyzzy                | error: No such option: --xyzzy
    nonsense                     | error: No such command 'nonsense'
    config                       | Usage: minikv config
""")
def test_what_the_program_does_not_take(
    words: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["minikv", *words.split()])
    with pytest.raises(SystemExit) as left:
        main.run()
    assert left.value.code == 2
    text = "".join(capsys.readouterr())
    assert text.strip().startswith(says)
    assert ("error" in text) == says.startswith("error")


def test_policies_come_from_the_registry() -> None:
    table = invoke("policies").stdout
    _, *rows = table.split("\n\n")[0].splitlines()
    assert [row.split()[0] for row in rows] == method_names()
    assert all(len(line) <= 80 for line in table.splitlines())
    words = " ".join(table.split())
    assert f" --policy takes {', '.join(prompt_names())} --decode" in words
    assert f" --decode takes {', '.join(step_names())} parts" in words
    for info in registry.methods():
        name = info.name
        assert re.search(rf"^{re.escape(name)} .*{info.paper}$", table, re.MULTILINE)
        card = invoke("policies", "show", name)
        assert card.exit_code == 0
        for option in info.options:
            default = re.search(rf"^-o {option.name}=(.+)$", card.stdout, re.MULTILINE)
            assert default is not None
            given = {option.name: default[1]}
            assert read_options(name, info.options, given)[option.name] == option.default
        assert all(len(line) <= 80 for line in card.stdout.splitlines())
        assert not re.search(r"\de\+", card.stdout)  # 1048576, not 1.04858e+06
    for name, meant in (("adakb", "adakv"), ("hashevikt", "hashevict"), ("pyramyd", "pyramid")):
        fails(invoke("policies", "show", name), 2, f"did you mean {meant}?")


def test_version_and_help() -> None:
    assert invoke("--version").stdout == f"minikv {minikv.__version__}\n"
    for arguments in ([], ["ask"], ["chat"], ["policies"]):
        result = invoke(*arguments, "--help")
        assert result.exit_code == 0
        lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
        assert re.match(r"(echo .* \| )?minikv ", lines[1]), "help begins with an example to copy"
    # The very first example is complete: it needs no file that a stranger does not have.
    assert re.search(r'^ *echo ".+" \| minikv ask ".+\?" *$', invoke().stdout, re.M)
