"""The modules that a program loads in a fresh interpreter: those of this project, and the other top-level packages."""

from dataclasses import dataclass
from pathlib import Path

from tests.builders.processes import ROOT, bare_environment, run_python

PRINT_LOADED = """
import sys
print("loaded:", *(name for name, module in sys.modules.items() if not hasattr(module, "__path__") or "." not in name))
"""


@dataclass(frozen=True)
class LoadedModules:
    """Names of modules.

    Attributes:
        own: Modules of this project, without packages.
        others: Top-level names of all other modules and packages.
    """

    own: list[str]
    others: set[str]


def loaded_modules(program: str, home: Path, *arguments: str) -> LoadedModules:
    """Run a program in a fresh interpreter, and return the modules that are loaded at its end.

    Args:
        program: Source of the program.
        home: Its home folder.
        arguments: Its arguments, in `sys.argv`.
    """
    environment = bare_environment(home, str(ROOT))
    done = run_python("-c", program + PRINT_LOADED, *arguments, environment=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    names = done.stdout.splitlines()[-1].removeprefix("loaded:").split()
    own = sorted(name for name in names if name.startswith(("flows.", "tasks.")))
    return LoadedModules(own, {name.partition(".")[0] for name in names} - {"flows", "tasks"})
