"""Command-line options of a flow, and the help that lists them."""

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from tasks.config.run import Run
from tasks.errors import WrongInput

HELP_ALL = "--help-all"


class Options:
    """The options of a flow: those of its form's first screen under both of their names, then the others by group."""

    def __init__(self, model: type[Run], program: str, *, show_all: bool) -> None:
        """Create the parser, to which pydantic-settings adds the options.

        Args:
            model: Settings of the flow.
            program: The command, as the user enters it.
            show_all: Whether the help lists the options of the groups, too.
        """
        self._model, self._show_all = model, show_all
        self._names: list[str] = []
        self._short_names = {f"{group}.{field}": name for name, (group, field) in model.first_screen.items()}
        groups = {
            name: f"{name} ({(field.description or field.annotation.__doc__ or name).rstrip('.')})"
            for name, field in model.model_fields.items()
            if _is_group(field.annotation)
        }
        shown = {group for group, _field_name in model.first_screen.values()}
        others = [f"  {title}" for name, title in groups.items() if name not in shown]
        self.parser = argparse.ArgumentParser(
            prog=program,
            usage="%(prog)s [--SETTING VALUE ...]",
            description=model.__doc__,
            epilog=None if show_all or not others else "\n".join(["further groups:", *others]),
            formatter_class=_OneLineEach,
            allow_abbrev=False,
        )
        self.parser.add_argument(HELP_ALL, action="help", help="show all settings of all groups, and exit")
        self._first = self.parser.add_argument_group("settings")
        self._groups = {name: self.parser.add_argument_group(title) for name, title in groups.items()}

    def add_group(self, parser: argparse.ArgumentParser, **titles: Any) -> argparse._ArgumentGroup:
        """Add a group of settings, which only `--help-all` shows."""
        return parser.add_argument_group(**titles) if self._show_all else parser.add_argument_group()

    def add_option(self, to: argparse._ActionsContainer, *names: str, **settings: Any) -> argparse.Action:
        """Add one option, with the description that the form in Prefect's UI shows."""
        name = names[0].removeprefix("--")
        if settings["help"] == argparse.SUPPRESS:  # a whole group as JSON
            return to.add_argument(*names, **settings)
        self._names.append(names[0])
        settings["help"] = self._described(name, settings["help"])
        if name in self._short_names or "." not in name:
            group = self._groups.get(name.partition(".")[0], self._first)
            shown = group.add_argument(f"--{self._short_names.get(name, name)}", **settings)
            if name not in self._short_names:
                return shown
            self._names.append(f"--{self._short_names[name]}")
        if name in self._short_names or not self._show_all:
            settings["help"] = argparse.SUPPRESS
        return to.add_argument(*names, **settings)

    def parse(self, parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse all arguments, with the parser of this object.

        Raises:
            WrongInput: An argument is not an option; the message suggests similar ones.
        """
        parsed, unknown = parser.parse_known_args(arguments)
        if not unknown:
            return parsed
        wrong = unknown[0].partition("=")[0]
        if not wrong.startswith("--"):
            raise WrongInput(
                f"unexpected argument '{wrong}'",
                way_out=f"{HELP_ALL} lists the options",
            )
        close = [name for name in self._names if _field(name) == _field(wrong)]
        close = close or difflib.get_close_matches(wrong, self._names, n=3, cutoff=0.7)
        advice = f"did you mean {' or '.join(close)}?" if close else f"{HELP_ALL} lists the options"
        raise WrongInput(
            f"unknown option '{wrong}'",
            way_out=advice,
        )

    def _described(self, name: str, text: str) -> str:
        *groups, field = name.split(".")
        model: Any = self._model
        for group in groups:
            model = model.model_fields[group].annotation
        in_form: str = model.model_json_schema()["properties"].get(field, {}).get("description", "")
        plain = model.model_fields[field].description or ""
        if plain and in_form.startswith(plain):  # argparse expands %
            text = text.replace(plain.replace("%", "%%"), in_form.replace("%", "%%"))
        return text.removesuffix(" (default: None)")


def _field(option: str) -> str:
    return option.rpartition(".")[2].removeprefix("--")


def _is_group(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


class _OneLineEach(argparse.RawDescriptionHelpFormatter):
    """A help with one line for each option: lines are not wrapped, and no blank line separates the groups."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=48, width=1000)

    def format_help(self) -> str:
        """Return the help."""
        description, options, rest = super().format_help().partition("\noptions:\n")
        return description + options + re.sub(r"\n\n+", "\n", rest)
