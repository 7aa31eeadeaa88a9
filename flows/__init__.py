"""Prefect flows: one module per flow, each body a table of contents."""

import sys

from tasks.environment import configures_mlflow, import_configured
from tasks.errors import WrongInput

try:
    # MLflow takes seconds to import, and not every run needs it.
    import_configured("prefect.main", *(["mlflow"] if configures_mlflow() else []))
except WrongInput as error:
    if sys.argv[0] != "-m":  # as Python has it while it looks for the module of `python -m flows.train`
        raise
    print(f"flows: {error}", file=sys.stderr)
    sys.exit(2)
