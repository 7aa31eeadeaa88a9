"""`make up`: a local stack with the Prefect and MLflow UIs, until Ctrl-C."""

import signal
import sys
import time

from deployments.stack.local_stack import PREFECT_PORT, local_stack, port_setting
from deployments.stack.login import OWN_STRING, auth_file, own_auth_string
from deployments.stack.processes import MLFLOW_UI, SERVICE_PORT, LocalStack, say
from tasks.environment import MLFLOW_PORT, lakevision_home
from tasks.errors import WrongInput
from tasks.summary import SUMMARY_FILE
from tasks.system.listening import HOST
from tasks.system.signals import interrupt_on


def login_lines(stack: LocalStack) -> list[str]:
    """Return instructions for logging in to both UIs and on the command line."""
    if own_auth_string() is None:
        page = f"to log in: {stack.auth_string}    (kept in {auth_file(stack.home)})"
        read = f"$(cat '{auth_file(stack.home)}')"
    else:
        page = f"to log in: the value of ${OWN_STRING}"
        read = f"${OWN_STRING}"
    # The login itself is not part of the command, which a shell's history would keep.
    own = f"PREFECT_API_URL={stack.url}/api LAKEVISION_HOME='{stack.home}' PREFECT_API_AUTH_STRING=\"{read}\""
    mlflow = "the same login for MLflow: the user name comes before the colon, the password after it"
    return [page, mlflow, f"for your own commands: export {own}"]


def show_mlflow_ui(stack: LocalStack, url: str) -> None:
    """Print the URL of MLflow's UI once it answers; return if it has ended, since the stack continues without it."""
    stack.wait_until(lambda: not stack.is_running(MLFLOW_UI) or stack.answers(f"{url}/health"), MLFLOW_UI)
    if stack.is_running(MLFLOW_UI):
        say(f"MLflow UI  {url}")


def start_service(stack: LocalStack) -> None:
    """Start the service of the champion; without a free port, the stack runs without it, and says so."""
    try:
        stack.start_service()
    except WrongInput as error:
        say(f"without the service: {error}")
    else:
        say(f"service    http://{HOST}:{stack.service_port}/ (drop an image; ready once there is a champion)")


def main() -> int:
    """Run the stack until a signal is received or one of its processes ends; return the exit code."""
    interrupt_on(signal.SIGTERM, signal.SIGHUP)
    try:
        port = port_setting("LAKEVISION_PORT", PREFECT_PORT)
        mlflow_port = port_setting("LAKEVISION_MLFLOW_PORT", MLFLOW_PORT)
        service_port = port_setting("LAKEVISION_SERVE_PORT", SERVICE_PORT)
        with local_stack(lakevision_home(), port, mlflow_port) as stack:
            say(f"Prefect UI {stack.url}")
            if (stack.home / SUMMARY_FILE).exists():
                say(f"newest result {stack.url}/artifacts/key/summary")
            for line in login_lines(stack):
                say(line)
            say("Ctrl-C stops the stack")
            show_mlflow_ui(stack, f"http://{HOST}:{mlflow_port}")
            stack.service_port = service_port
            start_service(stack)
            while True:
                stack.check_alive()
                time.sleep(1.0)
    except (WrongInput, RuntimeError, OSError) as error:
        print(f"make up: {error}", file=sys.stderr)
        return 2 if isinstance(error, WrongInput) else 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
