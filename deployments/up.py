"""`make up`: server, workers and MLflow's UI until Ctrl-C, for work in the UI."""

import signal
import sys
import time

from deployments.local_stack import PREFECT_PORT, local_stack, port_setting, say
from deployments.stack_processes import HOST
from tasks.environment import MLFLOW_PORT, lakevision_home
from tasks.errors import WrongInput
from tasks.signals import interrupt_on


def main() -> int:
    """Run the stack until a signal comes or one of its processes ends."""
    interrupt_on(signal.SIGTERM, signal.SIGHUP)
    try:
        port = port_setting("LAKEVISION_PORT", PREFECT_PORT)
        mlflow_port = port_setting("LAKEVISION_MLFLOW_PORT", MLFLOW_PORT)
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
    except (RuntimeError, OSError) as error:
        print(f"make up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
