"""`make up`: server, workers and MLflow's UI until Ctrl-C, for work in the UI."""

import os
import sys
import time

from deployments.local_stack import HOST, end_on_signals, local_stack, say
from tasks.environment import lakevision_home
from tasks.errors import WrongInput


def main() -> int:
    """Run the stack until a signal comes or one of its processes ends."""
    port = int(os.environ.get("LAKEVISION_PORT") or 4200)
    mlflow_port = int(os.environ.get("LAKEVISION_MLFLOW_PORT") or 5000)
    end_on_signals()
    try:
        with local_stack(lakevision_home(), port, mlflow_port) as stack:
            say(f"Prefect UI {stack.url}")
            say(f"MLflow UI  http://{HOST}:{mlflow_port}")
            say(f"for commands of your own: export PREFECT_API_URL={stack.url}/api LAKEVISION_HOME={stack.home}")
            say("Ctrl-C ends it all")
            while True:
                stack.check_alive()
                time.sleep(1.0)
    except WrongInput as error:
        print(f"make up: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"make up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
