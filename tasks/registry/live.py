"""The promotion of a challenger by its answers in service, which no test images of a table decide."""

import json
import logging

from tasks.errors import WrongInput
from tasks.refs import ModelRef, RunRef
from tasks.registry.aliases import check_predicts
from tasks.registry.decision import Promotion
from tasks.registry.history import record_pending, row_of_promotion
from tasks.registry.promote import CANDIDATES_TAG, make_champion, promotion_lock
from tasks.storage import Storage
from tasks.tracking import models
from tasks.tracking.evaluated import evaluated_version, evaluation_tags
from tasks.tracking.server import reachable
from tasks.tracking.trained_tables import serving_tags

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
        source = "" if of.table is None else models.source_name(of.table, storage)
        tags = evaluation_tags(of, source) | {
            models.PROMOTION_TAG: decision.sentence,
            CANDIDATES_TAG: json.dumps({challenger.run_id: of.val_accuracy}),
        }
        for table in (*before.serves, *(() if of.table is None else (of.table,))):
            tags |= serving_tags(table, table.source)
        if not make_champion(storage, decision, tags, of.table, row_of_promotion(decision, None)):
            raise WrongInput(
                f"{champion.name} version {champion.version} is not the champion any more",
                way_out="run the flow compare-live again, which compares with the present champion",
            )
    logger.info("%s", decision.sentence)
    return decision
