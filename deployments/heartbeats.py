"""The automation of the Prefect server that marks runs without a heartbeat as crashed."""

from datetime import timedelta

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

NAME = "lakevision: crash runs without a heartbeat"

SILENCE = timedelta(seconds=900)
"""Time without a heartbeat after which a run counts as lost: five of Prefect's default intervals. A machine that is
busy or unreachable for some minutes loses no run. The workers of this project send one every 30 s."""

HEARTBEAT = "prefect.flow-run.heartbeat"
SILENT_STATES = (
    "Completed", "Failed", "Cancelled", "Crashed",
    # Without a process: the run waits for an answer of a user, or for its next start.
    "Suspended", "Paused", "AwaitingRetry", "AwaitingConcurrencySlot", "Scheduled", "Late",
)  # fmt: skip
"""States of runs that send no heartbeats."""


def crash_silent_runs(client: SyncPrefectClient, silence: timedelta = SILENCE) -> None:
    """Create the automation if it is missing; an existing one keeps the user's settings.

    Args:
        client: Client of the server.
        silence: Time without a heartbeat after which a run is marked as crashed.
    """
    if client.read_automations_by_name(NAME):
        return
    trigger = EventTrigger.model_validate(
        {
            "posture": Posture.Proactive,
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "for_each": ["prefect.resource.id"],
            "after": [HEARTBEAT],
            "expect": [HEARTBEAT, *(f"prefect.flow-run.{state}" for state in SILENT_STATES)],
            "threshold": 1,
            "within": silence,
        }
    )
    message = f"It has sent no heartbeat for {silence.total_seconds():.0f} s: its process, worker or machine is gone."
    action = ChangeFlowRunState(state=StateType.CRASHED, message=message)
    about = "A run whose machine is gone would stay Running, and keep its slot."
    client.create_automation(AutomationCore(name=NAME, description=about, trigger=trigger, actions=[action]))
