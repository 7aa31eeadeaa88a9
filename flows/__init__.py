"""Prefect flows: one module per flow, each body a table of contents."""

import sys

from tasks.environment import import_configured, sets_mlflow_log
from tasks.errors import WrongInput

try:
    import_configured("prefect.main", *(("mlflow",) if sets_mlflow_log() else ()))
except WrongInput as error:
    if sys.argv[0] != "-m":  # as Python has it while it looks for the module of `python -m flows.train`
        raise
    print(f"flows: {error}", file=sys.stderr)
    sys.exit(2)
