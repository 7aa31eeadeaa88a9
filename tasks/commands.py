"""Shell commands for a user of a finished run, with the names of its tables and model filled in."""

import json
import shlex
from collections.abc import Mapping

from tasks.storage import Storage

PYTHON, PREFECT = ".venv/bin/python", ".venv/bin/prefect"

FOLDER = "FOLDER"
"""Placeholder in a command: the user's folder or URL of new images."""


def flow_command(flow: str, *arguments: str) -> str:
    """Return the command that runs a flow, in the folder of the checkout."""
    return shlex.join([PYTHON, "-m", f"flows.{flow}", *arguments])


def next_commands(storage: Storage, model: str, network: Mapping[str, str]) -> dict[str, str]:
    """Return the commands that a user may run after a promotion, by goal.

    Args:
        storage: Storage with the tables and the model.
        model: Name of the registered model.
        network: Settings of the network that a search begins with, by option; without any, those of the defaults.
    """
    tables, named = storage.options, [*storage.options, "--model_name", model]
    options = [text for name, value in network.items() for text in (f"--{name}", value)]
    config = {"source": FOLDER, "model_name": model, "storage": storage.as_config().model_dump(exclude_none=True)}
    deployment = ["--name", f"hourly-{model}", "--pool", "cpu", "--cron", "0 * * * *"]
    deployment += ["--params", json.dumps({"config": config})]
    return {
        "predict a folder": flow_command("predict_batch", "--source", FOLDER, *named),
        "as images come": flow_command("predict_stream", "--source", FOLDER, "--interval_seconds", "60", *named),
        "serve": flow_command("serve", *named),
        "schedule (make up)": shlex.join(
            [PREFECT, "--no-prompt", "deploy", "flows.predict_batch.predict_batch", *deployment]
        ),
        "improve": f"{flow_command('tune', *options, *tables)} && {flow_command('promote', *named)}",
        "roll back": flow_command("rollback", *named),
    }


def command_lines(commands: Mapping[str, str]) -> list[str]:
    """Return the commands for a terminal, one line per goal."""
    return [f"  {goal:<18} {command}" for goal, command in commands.items()]
