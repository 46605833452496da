"""Translate the runtime's messages from Python to the command line.

A message of the runtime says what the user can do in Python, in backquotes: an argument of
`minikv.load` or `chat.ask`, a call of a chat, or an attribute of it. Here these become flags and
slash commands.
"""

from __future__ import annotations

import re

from minikv.cli.settings.config import SETTINGS

_CODE = re.compile(r"`([^`\n]+)`")
_CALL = re.compile(r"chat\.(\w+)\(([^()]*)\)")
_SET = re.compile(r"chat\.(\w+) = (.+)")


def worded(text: str, *, chat: bool = False) -> str:
    """`dtype="float32"` becomes --dtype float32, `chat.undo(2)` /undo 2, `chat.reuse = "once"`
    /set reuse once. chat: what can change there is
    changed there, so `budget` becomes /set budget. Other backquotes stay as they are."""
    return _CODE.sub(lambda found: _worded(found[1], chat) or found[0], text)


def _worded(code: str, chat: bool) -> str:
    if call := _CALL.fullmatch(code):
        return f"/{call[1]} {_plain(call[2])}".rstrip()
    if change := _SET.fullmatch(code):
        return f"/set {change[1]} {_plain(change[2])}"
    settings = [_setting(argument, chat) for argument in code.split(", ")]
    return " ".join(settings) if all(settings) else ""


def _setting(argument: str, chat: bool) -> str:
    name, _, value = argument.partition("=")
    if name not in SETTINGS:
        return ""
    shown = f"/set {name}" if chat and SETTINGS[name].live else SETTINGS[name].flag
    return f"{shown} {'' if value == 'True' else _plain(value)}".rstrip()


def _plain(value: str) -> str:
    return value.strip("\"'")
