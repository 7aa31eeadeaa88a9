"""The promotion of a challenger by its answers in service, which no test images of a table decide."""

import json
import logging

from tasks.errors import WrongInput
from tasks.refs import ModelRef, RunRef
from tasks.registry.aliases import CHAMPION, check_predicts, repair_aliases
from tasks.registry.decision import Promotion, promotion_section
from tasks.registry.history import decision_tag, record, record_pending, row_of_promotion
from tasks.registry.promote import CANDIDATES_TAG, promotion_lock
from tasks.storage import Storage
from tasks.tracking import models
from tasks.tracking.evaluated import evaluated_version, evaluation_tags
from tasks.tracking.models import source_name
from tasks.tracking.pins import pin_trained_versions
from tasks.tracking.server import reachable
from tasks.tracking.trained_tables import NOT_PROMOTED_TAG, serving_tags

logger = logging.getLogger("lakevision.registry")


def promote_challenger(storage: Storage, champion: ModelRef, challenger: ModelRef, reason: str) -> Promotion:
    """Make a registered version the champion; a kill at any moment leaves the old one or the new one.

    Args:
        storage: Storage with the tracking URI.
        champion: The champion that it was compared with.
        challenger: The version.
        reason: Why, a part of a sentence.

    Raises:
        WrongInput: Another version is the champion by now, the challenger was rolled back, or it cannot be loaded.
        TrackingUnavailable: The tracking server does not answer; another run completes the work.
    """
    with reachable(storage), promotion_lock(storage, champion.name):
        record_pending(storage, champion)
        check_predicts(storage, challenger, "the challenger")
        known = models.version_tags(storage, challenger)
        if (rolled_back := known.get(models.ROLLED_BACK_TAG)) is not None:
            raise WrongInput(f"the challenger is not promoted, since {rolled_back}", way_out="give another challenger")
        of, before = evaluated_version(storage, challenger), evaluated_version(storage, champion)
        decision = Promotion(
            champion=challenger,
            outcome="promoted",
            challenger=RunRef(run_id=challenger.run_id),
            challenger_accuracy=of.accuracy,
            champion_accuracy=before.accuracy,
            challenger_images=of.images,
            champion_images=before.images,
            previous=champion,
            reason=reason,
        )
        row = row_of_promotion(decision, None)
        source = "" if of.table is None else source_name(of.table, storage)
        tags = evaluation_tags(of, source) | {
            models.PROMOTION_TAG: decision.sentence,
            models.PREVIOUS_TAG: str(champion.version),
            CANDIDATES_TAG: json.dumps({challenger.run_id: of.val_accuracy}),
        }
        for table in (*before.serves, *(() if of.table is None else (of.table,))):
            tags |= serving_tags(table, table.source)
        models.untag_version(storage, challenger, NOT_PROMOTED_TAG)
        models.describe_version(storage, challenger, promotion_section(decision.sentence))
        # Before the alias moves, so that it never names a version without its tags.
        models.tag_version(storage, challenger, tags | decision_tag(row))
        pin_trained_versions(storage, of.table)
        if models.model_with_alias(storage, champion.name, CHAMPION) != champion:
            raise WrongInput(
                f"{champion.name} version {champion.version} is not the champion any more",
                way_out="run the flow compare-live again, which compares with the present champion",
            )
        models.set_alias(storage, challenger, CHAMPION)
        repair_aliases(storage, challenger)
        record(storage, row)
    logger.info("%s", decision.sentence)
    return decision
