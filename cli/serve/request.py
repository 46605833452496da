"""Reads a request in the form of OpenAI's chat completions from JSON, and checks it.

Unsupported settings that would change the answer are refused in a sentence, not ignored. Unknown
keys are ignored, because clients send many.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minikv import checks
from minikv.chat.transcript import Message
from minikv.checks import quoted
from minikv.cli.paths import refuse_many
from minikv.cli.settings.config import SETTINGS
from minikv.errors import UsageError
from minikv.settings import Generation, settings_of

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_NO_TOOLS = "minikv gives a model no tools"
_UNSUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(("tools", "tool_choice", "functions", "function_call"), _NO_TOOLS),
    "response_format": "minikv writes text, and enforces no format",
    **dict.fromkeys(("logprobs", "top_logprobs"), "minikv returns no probabilities"),
    "logit_bias": "minikv changes no single token's probability",
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), "minikv has repeat_penalty instead"),
    "n": "minikv writes one answer to a request",
    **dict.fromkeys(("modalities", "audio"), "minikv writes text only"),
    "prediction": "minikv takes no predicted answer",
    "web_search_options": "minikv does not use the network",
}
_STOPS = 16
"""The most stop texts, because each is searched for after every token."""
_NOTHING: tuple[object, ...] = (
    None,
    False,
    0,
    "",
    [],
    {},
    "none",
    "auto",
    {"type": "text"},
    ["text"],
)
"""Values with which a key requests nothing; for `n`, also 1."""


class RequestError(UsageError):
    """A request cannot be answered. param: the key; code: a word for programs."""

    def __init__(self, message: str, param: str = "", code: str = "", status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True, slots=True)
class Request:
    """A request. messages: the last one is the question. seed: None if it states none. stream: send
    the answer piece by piece; usage: then with its cost at the end."""

    model: str
    messages: tuple[Message, ...]
    generation: Generation
    seed: int | None
    stream: bool
    usage: bool


def read(data: bytes, defaults: Generation) -> Request:
    """The request in the body `data`. defaults: for settings that it omits. Raises RequestError."""
    try:
        refuse_many(data)
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {str(error)[:80]}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    for key, why in _UNSUPPORTED.items():
        value = body.get(key)
        if value not in _NOTHING and not (key == "n" and value == 1):
            raise RequestError(f"{key} is not supported: {why}", key, "unsupported_parameter")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RequestError("stream_options must be an object", "stream_options")
    model = body.get("model")
    if not isinstance(model, str):
        raise RequestError("model is missing" if model is None else "model must be a text", "model")
    messages = _messages(body.get("messages"))
    if messages[-1].role != "user":
        raise RequestError("the last message must be the user's", "messages")
    generation = _generation(body, defaults)
    seed = body.get("seed")
    return Request(
        model,
        messages,
        generation,
        None if seed is None else int(_checked("seed", seed)),
        stream=_truth(body, "stream"),
        usage=_truth(options, "include_usage"),
    )


def _generation(body: Mapping[str, Any], defaults: Generation) -> Generation:
    """`defaults`, overridden by the body. Its keys are the names of the flags; OpenAI has a second
    one for `max_tokens`."""
    given = {name: body[name] for name in settings_of(Generation) if body.get(name) is not None}
    if body.get("max_completion_tokens") is not None:
        given["max_tokens"] = body["max_completion_tokens"]
    made = {name: _checked(name, value) for name, value in given.items() if value != []}
    if len(made.get("stop", ())) > _STOPS:
        raise RequestError(f"stop has more than {_STOPS} texts", "stop")
    return replace(defaults, **made)


def _checked(name: str, value: object) -> Any:
    try:
        for text in value if isinstance(value, list) else ():
            checks.unicode(name, text)
        return SETTINGS[name].read(value, name)
    except UsageError as error:
        raise RequestError(str(error), name) from None


def _truth(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if not isinstance(value, bool | None):
        raise RequestError(f"{key} must be true or false, got {quoted(value)}", key)
    return bool(value)


def _messages(given: object) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise RequestError("messages must be a list of at least one message", "messages")
    return tuple(_message(each, f"messages[{number}]") for number, each in enumerate(given))


def _message(given: object, where: str) -> Message:
    if not isinstance(given, dict):
        raise RequestError(f"{where} must be an object", where)
    role, content = given.get("role"), given.get("content")
    if given.get("tool_calls") or role in ("tool", "function"):
        raise RequestError(f"{where} is a tool's: {_NO_TOOLS}", where, "unsupported_parameter")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(
            f"{where}.role must be system, developer, user or assistant, got {quoted(role)}", where
        )
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{where}.content[{n}]") for n, part in enumerate(content))
    try:
        checks.unicode(f"{where}.content", content)
    except UsageError as error:
        raise RequestError(str(error), where) from None
    return Message(_ROLES[role], str(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = quoted(part.get("type") if isinstance(part, dict) else part)
        raise RequestError(f"{where} must be a part of type text, got {kind}", where)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a text", where)
    return text


def eviction_of(model: str, names: Sequence[str]) -> tuple[str, str]:
    """The policy and the budget in a request's model name, as in NAME@adakv:512; "" for the
    server's own. names: those of the server's model. Raises RequestError."""
    if model in names:
        return "", ""
    name, at, what = model.rpartition("@")
    if not at or name not in names:
        raise RequestError(
            f"the model {quoted(model)} is not here; this server has {names[0]}",
            "model",
            "model_not_found",
            404,
        )
    policy, _, budget = what.partition(":")
    if not policy:
        raise RequestError(f"the model {quoted(model)} names no policy: {name}@adakv:512", "model")
    return policy, budget
