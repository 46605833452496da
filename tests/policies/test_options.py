"""Values of options: read from text or Python, checked once, refused with what would be right."""

from __future__ import annotations

import pytest
from refusals import refused

from minikv.policies import find, read_options, registry
from minikv.policies.options import options_of

OPTIONS = find("adakv").prompt_options
DEFAULT = {option.name: f"the default is {str(option.default).lower()}" for option in OPTIONS}


def test_defaults_are_overlaid() -> None:
    values = read_options("adakv", OPTIONS, {"window": "16", "alpha": 0.5, "normalize": "yes"})
    plain = {option.name: option.default for option in OPTIONS}
    assert plain["kernel"] == 7
    assert values == plain | {"window": 16, "alpha": 0.5, "normalize": True}
    assert values["normalize"] is True


@pytest.mark.parametrize(
    ("given", "says", "hint"),
    [
        ({"windw": 3}, "adakv has no option 'windw'", "window, kernel"),
        ({"window": "x"}, "window must be int, got 'x'", "from 1 to 4096"),
        ({"window": 2.5}, "window must be int", "from 1 to 4096"),
        ({"window": True}, "window must be int", "the default is 32"),
        ({"kernel": 4}, "kernel must be odd, got 4", "an odd number"),
        ({"alpha": 2.0}, "alpha must be between 0.0 and 1.0, got 2.0", "the default is 0.2"),
        ({"pooling": "median"}, "pooling must be one of max, avg", "the default is max"),
        ({"normalize": "maybe"}, "normalize must be bool", "give true or false"),
        ({"normalize": "maybe"}, "normalize must be bool", DEFAULT["normalize"]),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, object], says: str, hint: str) -> None:
    error = refused("", read_options, "adakv", OPTIONS, given)
    assert says in str(error)
    assert hint in error.hint


@pytest.mark.parametrize(
    ("given", "means"),
    [
        *((text, True) for text in ("true", "Yes", "1", True)),
        *((text, False) for text in ("FALSE", "no", "0", False)),
    ],
)
def test_every_spelling_of_yes_and_no(given: object, means: bool) -> None:
    assert read_options("adakv", OPTIONS, {"normalize": given})["normalize"] is means


def test_every_option_takes_its_limits_and_nothing_beyond() -> None:
    known = [option for part in registry.parts() for option in options_of(part)]
    known += [option for method in registry.methods() for option in method.options]
    numbers = [option for option in known if type(option.default) in (int, float)]
    assert len(numbers) > 50
    for option in numbers:
        step = 1 if isinstance(option.default, int) else 0.5
        for limit, beyond in ((option.low, -step), (option.high, step)):
            assert limit is not None, option
            nearest = limit - beyond * (option.odd and limit % 2 == 0)
            for given in (nearest, str(nearest)):
                found = read_options("any", [option], {option.name: type(option.default)(given)})
                assert found == {option.name: nearest}, option
            wrong = type(option.default)(nearest + 2 * beyond)
            error = refused("must be between", read_options, "any", [option], {option.name: wrong})
            assert "None" not in error.hint
