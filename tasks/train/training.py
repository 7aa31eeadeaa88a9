"""A training run on one rank: its phases, checkpoints and MLflow logging."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter

from tasks.cache.manifest import open_cache
from tasks.collectives.reducer import Reducer, broadcast_value, run_on_rank_zero, wait_for_rank_zero
from tasks.config.recipe import Phase, phases_of
from tasks.config.train import AUTO_SECONDS
from tasks.environment import given_threads, local_rank_and_size
from tasks.errors import Diverged
from tasks.metrics.evaluate import EpochMetrics
from tasks.model.device import make_deterministic, take_device
from tasks.model.training_network import build_classifier, copy_of_state
from tasks.progress.activity import expect_slow_steps, working
from tasks.progress.start_clock import process_start
from tasks.refs import TRAIN, VAL, RunRef
from tasks.system.cores import num_cores
from tasks.train.checkpoint import Checkpoints, restore, restore_progress, writes_checkpoints
from tasks.train.context import TrainingContext
from tasks.train.continuation import check_fits, continued_run, end_checkpoints, neutral_settings
from tasks.train.features import StandardizedHead
from tasks.train.loop import fit, has_epochs_left
from tasks.train.phases import Trainable, prepare_phase, trains_on_features
from tasks.train.progress import Progress, ReportedEpoch, ResumePoint, new_progress
from tasks.train.serving_form import evaluate_serving_form
from tasks.train.spec import TrainingSpec
from tasks.train.step import WeightAverage
from tasks.train.step_callback import StepCallback, TracedSteps

if TYPE_CHECKING:
    from tasks.train.results import Record

logger = logging.getLogger("lakevision.train")

RUN = TypeAdapter(RunRef)

RANK_ZERO_PART = TypeAdapter(tuple[str, dict[str, str]])
"""What only rank 0 knows of a checkpoint: the id of the MLflow run, and the tags that training sets on it."""

OnEpoch = Callable[[ReportedEpoch], None]
"""Called on rank 0 after each epoch."""


class Training:
    """A training run on one rank."""

    def __init__(self, spec: TrainingSpec, reducer: Reducer, on_epoch: OnEpoch | None = None) -> None:
        self.folder = spec.storage.checkpoints / spec.key
        self._spec = spec
        self._train = spec.train
        self._reducer = reducer
        self._began = time.monotonic()
        self._on_epoch = on_epoch
        self.writes = writes_checkpoints(spec, reducer.rank)
        self.checkpoints = Checkpoints(self.folder, self._train.keep_checkpoints, spec.identity)
        self.progress = new_progress(self._train)
        # Set on rank 0 while the MLflow run is open.
        self._record: Record | None = None

    def run(self, resume_point: ResumePoint) -> RunRef:
        """Train on this rank."""
        if resume_point.finished is not None:
            logger.info(
                "MLflow run %s has already completed this training run: nothing to train", resume_point.finished.run_id
            )
            return resume_point.finished
        context = self._prepare()
        # Loaded by each rank: with the optimizer's moments it may have gigabytes, too much for a broadcast.
        checkpoint = None if resume_point.checkpoint is None else self.checkpoints.load(resume_point.checkpoint)
        if checkpoint is not None:
            neutral = neutral_settings(self._spec, checkpoint)
            check_fits(checkpoint, self._spec.identity, context.manifest.classes, self.folder, neutral)
            restore_progress(checkpoint, self.progress, self._reducer.rank)
            logger.info("resuming at epoch %d, image %d", self.progress.next_epoch, self.progress.running.position)
        self.progress.classes = context.manifest.classes
        before = self.progress.provenance
        if self.writes:
            # Here: it asks MLflow's package for the code, and other ranks write no provenance.
            from tasks.train.provenance import current_provenance

            self.progress.provenance = current_provenance(context.device, context.precision)
        if self._reducer.rank != 0:
            self._run_phases(context, checkpoint)
            evaluate_serving_form(context)
            return wait_for_rank_zero(self._reducer, RUN)
        # Here: only rank 0 loads MLflow, tables and figures.
        from tasks.train.results import open_record

        with open_record(context, self.progress, resume_point.resume) as record:
            self._record = record
            if checkpoint is not None:
                record.resume(continued_run(self._spec, checkpoint))
            record.note_changes(before, has_checkpoint=checkpoint is not None)
            try:
                self._run_phases(context, checkpoint)
                test = evaluate_serving_form(context)
            except BaseException:
                record.abandon()
                raise
            result = run_on_rank_zero(self._reducer, RUN, lambda: record.finish(context, test))
        end_checkpoints(self._spec)
        return result

    def _prepare(self) -> TrainingContext:
        train, reducer = self._train, self._reducer
        manifest = open_cache(self._spec.cache)
        # The launcher has set these variables; otherwise all ranks are in this process.
        local_rank, local_size = local_rank_and_size() or (reducer.rank, reducer.num_ranks)
        device = take_device(train.device, local_rank, reducer)
        torch.set_num_threads(train.num_threads or given_threads() or max(1, num_cores() // local_size))
        make_deterministic(device)
        torch.manual_seed(train.seed)
        classes = manifest.classes
        classifier = build_classifier(
            train.model, train.weights, len(classes), train.trained != "all", classes, train.dropout
        )
        classifier = classifier.to(device)
        reducer.broadcast_model(classifier)
        # The memory format of the cache's pixels, on any number of ranks: dropout draws in the order of the memory.
        classifier = classifier.to(memory_format=torch.channels_last)
        context = TrainingContext(self._spec, manifest, classifier, device, reducer)
        context.check()
        context.agree_on_precision()
        return context

    def _run_phases(self, context: TrainingContext, checkpoint: dict[str, Any] | None) -> None:
        progress = self.progress
        if self._train.folds and not progress.folds:
            from tasks.train.folds import cross_validate  # Here: most training runs have none.

            progress.folds = cross_validate(context)
        for phase in self._phases(context):
            if phase.number < progress.phase:
                continue
            is_new = phase.number > progress.phase or checkpoint is None
            if phase.number > progress.phase:
                # A new phase starts with the best weights so far, and counts its own patience.
                progress.phase, progress.first_epoch, progress.batch_size = phase.number, progress.next_epoch, None
                progress.stopping = replace(progress.stopping, epochs_without_improvement=0)
            trainable = prepare_phase(context, phase, progress)
            if is_new:
                progress.phases = [*progress.phases, (progress.first_epoch, phase.name)]
                progress.average = {}
                if phase.number > 0:
                    progress.best_state = copy_of_state(trainable.model)
            if self._record is not None and progress.batch_size != self._train.batch_size:
                self._record.set_batch_size(phase.number)
            if checkpoint is not None and checkpoint["phase"] == phase.number:
                restore(checkpoint, trainable.model, trainable.optimizer, trainable.loop.buffers)
                if progress.scaler is not None and checkpoint["loss_scale"]:
                    progress.scaler.load_state_dict(checkpoint["loss_scale"])
            process_start.passed("preparation")
            is_over = self._fit(context, phase, trainable)
            if isinstance(trainable.model, StandardizedHead):
                trainable.model.fold()
            if is_over:
                break

    def _phases(self, context: TrainingContext) -> Iterator[Phase]:
        """Yield the phases; the fine-tuning of a recipe is planned after those before it, unless it was before."""
        on_features = trains_on_features(context)
        yield from phases_of(self._train, on_features=on_features)
        if not self._train.plans_fine_tuning:
            return
        if not self.progress.plan:
            from tasks.train.plan import plan_fine_tuning  # Here: other recipes do not plan.

            planned = self._spec.plan or plan_fine_tuning(context, self._seconds_left())
            self.progress.plan = planned.model_dump()
        plan = self.progress.fine_tuning
        assert plan is not None, "it was just made"
        if self._record is not None:
            logger.info("fine-tuning: %s", plan.reason)
            self._record.set_plan(plan)
        phases = phases_of(self._train, plan, on_features=on_features)
        yield from (phase for phase in phases if phase.whole)

    def _seconds_left(self) -> float:
        """Return the seconds of the budget for fine-tuning: without those since the start of this process."""
        budget = self._train.max_seconds or (AUTO_SECONDS if self._train.recipe == "auto" else None)
        return float("inf") if budget is None else budget - (time.monotonic() - self._began)

    def _fit(self, context: TrainingContext, phase: Phase, trainable: Trainable) -> bool:
        """Train a phase; return whether the time budget is used up."""
        train, progress, reducer = self._train, self.progress, self._reducer
        model, optimizer = trainable.model, trainable.optimizer
        num_threads = torch.get_num_threads()
        if train.trains_head_only and model is not context.classifier:
            torch.set_num_threads(1)  # Several threads add up the products of a head in another order.

        def save() -> None:
            with working("writing a checkpoint"):
                content = self.checkpoints.collect(model, optimizer, progress, reducer, trainable.loop.buffers)
                run_id = "" if self._record is None else self._record.run_id
                if not self._spec.shares_home:  # The first rank of each host writes it.
                    run_id, content["tags"] = broadcast_value(reducer, RANK_ZERO_PART, (run_id, progress.tags))
                is_saved = self.writes and self.checkpoints.save(content, progress, run_id)
                # Metrics are sent with the checkpoint that covers them, so that none is logged twice.
                if self._record is not None and is_saved:
                    self._record.send_epochs()

        def seconds_left() -> float:
            # A budget that was turned into epochs ends nothing: they would differ on another machine.
            budget = None if train.plans_fine_tuning else train.max_seconds
            return (budget or float("inf")) - progress.seconds - progress.running.seconds

        step_callback = StepCallback(
            reducer, save, checkpoint_seconds=train.checkpoint_seconds, seconds_left=seconds_left
        )

        traced = None
        if train.trace_steps and self._record is not None:
            name = f"phase-{progress.phase:02d}.json.gz"
            traced = TracedSteps(train.trace_steps, name, self._record.log_trace)
        histograms = None
        if train.histograms and self._record is not None:
            from tasks.train.histograms import LayerHistograms  # Here: few runs have them.

            val, log = trainable.loaders[VAL], self._record.log_histograms
            histograms = LayerHistograms(model, val, trainable.loop.device, log)

        def on_epoch(metrics: EpochMetrics, _progress: Progress) -> None:
            if histograms is not None:  # First: a process that is killed now trains the rest of the epoch again.
                histograms.end_epoch(metrics.epoch)
            save()
            step_callback.saved()
            expect_slow_steps(slow=False)
            if reducer.rank != 0:  # Only this rank's own figures: rank 0 logs the metrics, which are over all ranks.
                waited = 100 * metrics.data_wait_share
                logger.info("epoch %d: %.1f %% of %.1f s waited for data", metrics.epoch, waited, metrics.train_seconds)
            if self._on_epoch is not None and reducer.rank == 0:
                plan = progress.fine_tuning or self._spec.plan
                phases = phases_of(train, plan, on_features=trains_on_features(context))
                is_last = phase.number == phases[-1].number and not has_epochs_left(progress, phase.train.max_epochs)
                later = sum(other.train.max_epochs for other in phases if other.number > phase.number)
                reported = ReportedEpoch(
                    **vars(metrics),
                    ends_training=(is_last and not (train.plans_fine_tuning and plan is None)) or seconds_left() <= 0,
                    max_epochs=progress.first_epoch + phase.train.max_epochs + later,
                )
                self._on_epoch(reported)

        decay, with_buffers = phase.train.ema_decay, train.recipe != "given"
        loop = replace(
            trainable.loop,
            average=WeightAverage(model, decay, progress.average, with_buffers=with_buffers) if decay else None,
            step_callback=step_callback,
            watchers=[watcher.after_step for watcher in (histograms, traced) if watcher is not None],
        )
        try:
            is_over = fit(model, trainable.loaders, optimizer, loop, progress, on_epoch)
            if traced is not None:
                traced.end()
            return is_over
        except Diverged as diverged:
            from tasks.report.image_names import name_images  # Here: it loads Spark and Delta.

            raise diverged.with_image_names(
                lambda rows: name_images(context.manifest, TRAIN, rows, self._spec.storage)
            ) from None
        except KeyboardInterrupt:
            # Interrupted in the validation, when all ranks have trained the epoch; otherwise the checkpoint is written.
            if self._record is not None and progress.running.is_trained:
                content = self.checkpoints.collect(model, optimizer, progress, Reducer())
                self.checkpoints.save(content, progress, self._record.run_id)
            raise
        finally:
            torch.set_num_threads(num_threads)
            reducer.release_model()
