"""The question whether a run becomes the champion, and its answer."""

from tasks.config.prediction import PredictConfig
from tasks.config.promotion import PromoteConfig
from tasks.config.storage import SparkConfig, StorageConfig
from tasks.orchestration.approval import ask, submit_question
from tasks.registry.comparison import comparison_markdown
from tasks.registry.decision import Approval, Promotion
from tasks.text.markup import markdown_text


def ask_user(decision: Promotion, promote: PromoteConfig) -> Approval:
    """Return the answer; the process ends until it is given, and the flow begins anew.

    Args:
        decision: A decision that waits for an approval.
        promote: Settings of the gate. After `approval_seconds` without an answer, the server fails the run.

    Raises:
        WrongInput: As for `ask`.
    """
    again = f"submit another run of the deployment promote, with run_ids ['{decision.challenger.run_id}']"
    answer = ask(question(decision), decision.model_dump(mode="json"), promote.approval_seconds, again)
    return Approval(
        approved=answer.decision == "promote",
        by=answer.name,
        comment=answer.comment,
        champion_version=None if decision.previous is None else decision.previous.version,
    )


def question(decision: Promotion) -> str:
    """Return the question with all figures as Markdown."""
    figures = "" if decision.comparison is None else comparison_markdown(decision.comparison)
    asked = f"{decision.champion.name} version {decision.champion.version}"
    return f"## Shall {markdown_text(asked)} become the champion?\n\n{markdown_text(decision.reason)}.\n{figures}"


def ask_elsewhere(
    decision: Promotion,
    promote: PromoteConfig,
    storage: StorageConfig | None,
    spark: SparkConfig,
    predict: PredictConfig,
) -> str:
    """Submit a run of the deployment `promote` that asks; return what a user has to do, as a part of a sentence.

    Args:
        decision: A decision that waits for an approval.
        promote: Settings of the gate.
        storage: Locations as the user gave them; None if no run is to be submitted.
        spark: Settings of the Spark session.
        predict: Settings of inference.
    """
    submitted = None
    if storage is not None:
        config = {
            "run_ids": [decision.challenger.run_id],
            # The name of this table's model: the run may record another table with the same images.
            "promote": promote.model_dump(mode="json") | {"model_name": decision.champion.name},
            "storage": storage.model_dump(mode="json"),
            "spark": spark.model_dump(mode="json"),
            "predict": predict.model_dump(mode="json"),
        }
        submitted = submit_question(config)
    if submitted is not None:
        return f"answer the question of {submitted}"
    return f"run the deployment promote with run_ids ['{decision.challenger.run_id}'] and answer its question"
