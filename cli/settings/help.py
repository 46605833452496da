"""Help with two lengths: --help shows the common flags, --help-all also the others, by subject.

A common flag has no help panel; every other flag has one. Where typer would show the type of a
value (`<bool>`, `<list[str]>`), a word is shown instead; a switch has none.
"""

from __future__ import annotations

from copy import copy
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

if TYPE_CHECKING:
    from typer._click import Command, Context


ALL = "--help-all"
_NARROW = 64
"""Help for fewer columns has no panels: their columns would be too narrow for flags and words."""
_NAME = "help_all"
_WORDS = {
    "<str>": "TEXT",
    "<int>": "N",
    "<float>": "N",
    "<path>": "FILE",
    "<list[str]>": "TEXT",
    "<list[Path]>": "FILE",
}


class Later(TyperCommand):
    """A command whose flags are imported only when it runs or shows its help; until then it is a
    line in the list of commands. Its function returns the app with its flags or subcommands."""

    def imported(self) -> Command:
        """The command itself."""
        assert self.callback is not None
        made = typer.main.get_command(self.callback())
        made.name = self.name
        return made


class Group(TyperGroup):
    """The commands of an app, with this kind of help. Apps inside it must have the same class."""

    def whole(self, name: str) -> Command:
        """The command of that name, with its flags. Raises KeyError."""
        found = self.commands[name]
        if isinstance(found, Later):
            found = self.commands[name] = found.imported()
        return found

    def resolve_command(
        self, ctx: Context, args: list[str]
    ) -> tuple[str | None, Command | None, list[str]]:
        name, found, rest = super().resolve_command(ctx, args)
        if name is not None:
            found = self.whole(name)
            _prepare(found, ctx)
        return name, found, rest

    def format_help(self, ctx: Context, formatter: Any) -> None:
        _prepare(self, ctx)
        super().format_help(ctx, formatter)


class _Argument(TyperArgument):
    """An argument that is shown without its type, and without braces in the line of usage."""

    def display_type_rich(self, ctx: Context) -> str | None:
        return None

    def get_usage_pieces(self, ctx: Context) -> list[str]:
        shown = str(self.metavar) if self.required else f"[{self.metavar}]"
        return [shown + "..." * (self.nargs != 1)]


def _prepare(command: Command, ctx: Context) -> None:
    """Set the words that stand for values, and add --help-all to a command with hidden flags."""
    if any(param.name == _NAME for param in command.params):
        return
    if isinstance(command, TyperCommand | TyperGroup) and get_terminal_size().columns < _NARROW:
        command.rich_markup_mode = None
    shown = command.get_help_option(ctx)
    hidden = 0
    for param in command.params:
        if isinstance(param, TyperArgument):
            param.__class__ = _Argument  # typer has no switch for this
            param.metavar = param.metavar or str(param.name).upper()
        elif isinstance(param, TyperOption):
            if param.metavar is None:
                kind = param.display_type(ctx)
                param.metavar = "" if param.is_flag else _WORDS.get(kind, kind.strip("<>"))
            # Completion must offer all flags, but does not offer hidden ones.
            param.hidden = bool(param.rich_help_panel) and not ctx.resilient_parsing
            hidden += param.hidden
    if shown is not None:
        shown.metavar, shown.help = "", "show this"
        if hidden:
            whole = copy(shown)  # --help-all, made like the command's --help
            others = f"{hidden} flags" if hidden > 1 else "flag"
            whole.name, whole.opts, whole.help = _NAME, [ALL], f"also show the other {others}"
            whole.callback = _show_all
            command.params.append(whole)


def _show_all(ctx: Context, param: object, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        for each in ctx.command.params:
            if isinstance(each, TyperOption):
                each.hidden = each.name == _NAME
        typer.echo(ctx.get_help())
        ctx.exit()
