"""Command line of the flows: the options and their help; each setting is an option, each input error one sentence."""

import argparse
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from prefect import Flow
from prefect.logging.configuration import setup_logging
from prefect.logging.handlers import PrefectConsoleHandler
from pydantic import BaseModel, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)
from rich.console import Console

from tasks.commands import command_lines
from tasks.config.run import Run
from tasks.environment import PROGRESS_BARS
from tasks.errors import WrongInput, explain, loggable, similar_names
from tasks.progress.bar import progress_bars
from tasks.storage import resolve_storage
from tasks.system.home import check_home, make_home, rotate
from tasks.system.signals import interrupt_on
from tasks.text.log_lines import SingleLineFilter

Config = TypeVar("Config", bound=Run)

EXIT_WRONG_INPUT, EXIT_INTERRUPTED = 2, 130

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
            raise WrongInput(f"unexpected argument '{wrong}'", way_out=f"{HELP_ALL} lists the options")
        close = [name for name in self._names if _field(name) == _field(wrong)]
        listed = f"{HELP_ALL} lists the options"
        advice = f"did you mean {' or '.join(close)}?" if close else similar_names(wrong, self._names, listed)
        raise WrongInput(f"unknown option '{wrong}'", way_out=advice)

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


def parse_arguments(model: type[Config], program: str, arguments: Sequence[str]) -> Config:
    """Build `model` from options such as --cache.image_size 128.

    Raises:
        ValidationError: An option has an invalid value.
        WrongInput: As `Options.parse`.
    """
    options = Options(model, program, show_all=HELP_ALL in arguments)

    class FromCommandLine(BaseSettings, model):  # type: ignore[misc, valid-type]  # the base class is a parameter
        model_config = SettingsConfigDict(nested_model_default_partial_update=True)

        @classmethod
        def settings_customise_sources(  # type: ignore[override]  # pydantic-settings passes the others by name
            cls, settings_cls: type[BaseSettings], **_others: PydanticBaseSettingsSource
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            # Options only: an environment variable that happens to be called TRAIN or CACHE must not be read.
            return (
                CliSettingsSource[argparse.ArgumentParser](
                    settings_cls,
                    cli_parse_args=list(arguments),
                    cli_hide_none_type=True,
                    cli_avoid_json=True,
                    root_parser=options.parser,
                    parse_args_method=options.parse,
                    add_argument_method=options.add_option,
                    add_argument_group_method=options.add_group,
                ),
            )

    FromCommandLine.__doc__ = model.__doc__
    parsed: BaseSettings = FromCommandLine()
    return model.model_validate(parsed.model_dump())


def _route_logs(config: BaseModel) -> str:
    """Write logs to a file, too, and return its path."""
    storage = resolve_storage(config.storage)  # type: ignore[attr-defined]  # every flow's parameters have a storage
    check_home(Path(storage.home), storage.home_entries)
    make_home(Path(storage.home))
    log = storage.logs / "flows.log"
    log.parent.mkdir(exist_ok=True)
    rotate(log)
    file = logging.FileHandler(log)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    setup_logging()  # Prefect would create its handlers only when the flow starts.
    file.addFilter(SingleLineFilter())
    logging.getLogger().addHandler(file)
    return str(log)


def _log_console() -> Console:
    """Return the console of Prefect's log, so that progress bars are drawn below its lines."""
    handlers = (handler for handler in logging.getLogger().handlers if isinstance(handler, PrefectConsoleHandler))
    return next((handler.console for handler in handlers), Console(stderr=True))


def _drop_frames(error: BaseException | None) -> None:
    """Free what the frames of a failed flow hold: DuckDB prints a line for each object that is left at the end."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def run_from_command_line(
    flow: Flow[Any, Any], model: type[Config], show: Callable[[Any, Any], str] | None = None
) -> None:
    """Run a flow with this process's command-line options; exit with 2 on wrong input, with 1 on any other failure.

    Args:
        flow: The flow.
        model: Its parameters.
        show: Returns text about result and parameters for people, which follows the JSON of the result on stderr.
    """
    os.environ.setdefault(PROGRESS_BARS, "false")
    # Only a module run with -m has a spec; spark-submit runs a file.
    module = sys.modules["__main__"].__spec__
    program = f"python -m {module.name}" if module else Path(sys.argv[0]).name
    try:
        config = parse_arguments(model, program, sys.argv[1:])
    except (ValidationError, SettingsError, WrongInput) as error:
        print(f"{program}: {explain(error) if isinstance(error, ValidationError) else error}", file=sys.stderr)
        sys.exit(EXIT_WRONG_INPUT)
    log = "none"
    # As Ctrl-C does: otherwise Prefect's temporary server, and what the run has started, would outlive this process.
    interrupt_on(signal.SIGTERM, signal.SIGHUP)
    try:
        log = _route_logs(config)
        with progress_bars(_log_console()):
            result = flow(config)
    except WrongInput as error:
        print(f"{program}: {error}", file=sys.stderr)
        _drop_frames(error)
        sys.exit(EXIT_WRONG_INPUT)
    except KeyboardInterrupt as error:
        print(f"{program}: interrupted ({error or 'Ctrl-C'})", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        print(f"{program}: {type(error).__name__}: {loggable(error)} (full log: {log})", file=sys.stderr)
        _drop_frames(error)
        sys.exit(1)
    assert isinstance(result, BaseModel), "every flow returns a ref, a report or a summary"
    # Fields with one entry per image are not printed: the artifacts have them.
    long_fields = {name for name, field in type(result).model_fields.items() if not field.repr}
    print(result.model_dump_json(indent=2, exclude=long_fields), flush=True)
    if show is not None:
        print(f"\n{show(result, config)}", file=sys.stderr)
    # Not among the output that a program parses.
    for line in command_lines(getattr(result, "next", {})):
        print(line, file=sys.stderr)
