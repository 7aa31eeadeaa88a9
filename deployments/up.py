"""`make up`: server, workers and MLflow's UI until Ctrl-C, for work in the UI."""

import signal
import sys
import time

from deployments.local_stack import PREFECT_PORT, local_stack, port_setting
from deployments.login import OWN_STRING, auth_file, own_auth_string
from deployments.ports import HOST
from deployments.stack_processes import LocalStack, Waiting, say
from tasks.environment import MLFLOW_PORT, lakevision_home
from tasks.errors import WrongInput
from tasks.system.signals import interrupt_on


def login_lines(stack: LocalStack) -> list[str]:
    """Return how to log in on both pages and on the command line."""
    if own_auth_string() is None:
        page = f"to log in: {stack.auth_string}    (kept in {auth_file(stack.home)})"
        read = f"$(cat '{auth_file(stack.home)}')"
    else:
        page = f"to log in: your own ${OWN_STRING}"
        read = f"${OWN_STRING}"
    # The string itself is in no command, which a shell's history would keep.
    own = f"PREFECT_API_URL={stack.url}/api LAKEVISION_HOME='{stack.home}' PREFECT_API_AUTH_STRING=\"{read}\""
    mlflow = "MLflow asks for the same login: the user is what stands before the colon, the password what follows it"
    return [page, mlflow, f"for commands of your own: export {own}"]


def show_mlflow_ui(stack: LocalStack, url: str) -> None:
    """Print where MLflow's UI is when it answers, or return when it has ended: a stack goes on without."""
    waiting = Waiting(stack, "mlflow-ui")
    while stack.runs("mlflow-ui"):
        if stack.answers(f"{url}/health"):
            say(f"MLflow UI  {url}")
            return
        stack.check_alive()
        waiting.tell()
        time.sleep(0.3)


def main() -> int:
    """Run the stack until a signal comes or one of its processes ends."""
    interrupt_on(signal.SIGTERM, signal.SIGHUP)
    try:
        port = port_setting("LAKEVISION_PORT", PREFECT_PORT)
        mlflow_port = port_setting("LAKEVISION_MLFLOW_PORT", MLFLOW_PORT)
        with local_stack(lakevision_home(), port, mlflow_port) as stack:
            say(f"Prefect UI {stack.url}")
            for line in login_lines(stack):
                say(line)
            say("Ctrl-C ends it all")
            show_mlflow_ui(stack, f"http://{HOST}:{mlflow_port}")
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
