"""The modules of this project that a process has loaded, in a fresh interpreter."""

from pathlib import Path

from tests.builders.processes import ROOT, bare_environment, run_python

PRINT_LOADED = """
import sys
ours = {name: module for name, module in sys.modules.items() if name.startswith(("flows.", "tasks."))}
print("loaded:", *sorted(name for name, module in ours.items() if not hasattr(module, "__path__")))
"""


def loaded_modules(program: str, home: Path, *arguments: str) -> list[str]:
    """Run a program in a fresh interpreter; return the modules of ours, without packages, that are loaded at its end.

    Args:
        program: Source of the program.
        home: Its home folder.
        arguments: Its arguments, in `sys.argv`.
    """
    environment = bare_environment(home, str(ROOT))
    done = run_python("-c", program + PRINT_LOADED, *arguments, environment=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].removeprefix("loaded:").split()
