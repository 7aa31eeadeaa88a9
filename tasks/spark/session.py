"""Creation, reuse and shutdown of the Spark session, and the early start of its Python workers."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tasks.config.storage import SparkConfig
from tasks.config.values import memory_bytes
from tasks.environment import PRELOAD, name_files_in_utf8, worker_memory
from tasks.spark import gateway
from tasks.spark.cluster import is_authenticated_by_secret, is_local, python_of_workers, session_master
from tasks.spark.jvm import check_java
from tasks.spark.scratch import Scratch, scratch_root
from tasks.spark.settings import check_callers_session, session_settings
from tasks.spark.worker_log import forward_worker_lines, stderr_into
from tasks.storage import Storage
from tasks.system.cores import free_memory
from tasks.system.home import rotate

logger = logging.getLogger("lakevision.spark")

Result = TypeVar("Result")

BROADCAST_ROWS = 1_000_000
"""Tables of up to this many rows without images (about 100 bytes each) are broadcast: no image is shuffled."""

WAIT_SECONDS = 0.5
"""Time after which a thread that waits for Spark can be interrupted."""

SPARE_HEAPS = 4
"""Free memory from which an idle JVM is kept during a training run, in multiples of its maximum heap."""


@dataclass
class _SessionState:
    """The session that this module started, and its users: Spark has one session per process, whatever its threads."""

    turn: threading.RLock = field(default_factory=threading.RLock)
    """Held by the thread that uses a session: the jobs, progress and log lines of two runs would be taken for one."""
    uses: int = 0
    """Nesting depth of `spark_session` in that thread."""
    scopes: set[object] = field(default_factory=set)
    """The open scopes of `keep_spark`, of all threads; the last one stops the session."""
    session: SparkSession | None = None
    started_by: tuple[int, SparkConfig, str] | None = None
    """Thread, settings and home of the session."""
    scratch: Scratch | None = None


_state = _SessionState()


@contextmanager
def keep_spark() -> Iterator[None]:
    """Keep the first session opened inside open for all later ones inside, and stop it at the end.

    If other threads have such scopes as well, the session is stopped at the end of the last one.
    """
    scope = object()
    _state.scopes.add(scope)
    try:
        yield
    finally:
        _state.scopes.discard(scope)  # A forked process has none.
        if not _state.scopes:
            _stop_kept_session()


def release_memory_for_training(config: SparkConfig) -> None:
    """Stop the kept session before a long stage without Spark, unless it is local and there is memory for both.

    Another session costs the start of a JVM and the loading of its classes, about ten seconds; an idle JVM costs its
    heap. On a cluster an idle session would hold its executors for hours. A session that another thread uses stays.
    """
    if (session := _state.session) is None:
        return
    is_roomy = free_memory() >= SPARE_HEAPS * memory_bytes(config.driver_memory)
    if is_roomy and is_local(str(session.sparkContext.master)):
        return
    logger.info("Spark is stopped until it is needed again")
    _stop_kept_session()


def _stop_kept_session() -> None:
    if not _state.turn.acquire(blocking=False):
        return  # Another thread uses it, and stops it at its end.
    try:
        if (session := _state.session) is not None and not _state.uses:
            _state.session = None
            _stop(session)
    finally:
        _state.turn.release()


@contextmanager
def _turn() -> Iterator[None]:
    """Wait until no other thread of this process uses Spark."""
    if not _state.turn.acquire(blocking=False):
        logger.info("another run of this process uses Spark: waiting until it ends")
        while not _state.turn.acquire(blocking=False):
            time.sleep(WAIT_SECONDS)  # Not in acquire: a time limit raised after it would leave the lock held.
    _state.uses += 1
    try:
        yield
    finally:
        _state.uses -= 1
        _state.turn.release()


@contextmanager
def spark_session(config: SparkConfig, storage: Storage) -> Iterator[SparkSession]:
    """Yield a Spark session with Delta: the active one, or a new session that is stopped at the end.

    A retry after the JVM was killed starts another JVM. Threads of one process use Spark one after the other: inside,
    do not wait for a thread that uses Spark. `keep_spark` keeps a session without holding it.

    Raises:
        WrongInput: No Java 17 or 21, Spark cannot use its settings, or as `cluster_settings` and
            `check_callers_session`.
        ClusterUnavailable: As `cluster_settings`.
        SparkFailed: Spark did not start, or work inside failed in the JVM or in a Python worker.
    """
    log = storage.logs / "spark.log"
    with keep_spark(), _turn():
        session = _find_or_start(config, storage, log)
        forwarded = forward_worker_lines(log) if _state.uses == 1 else nullcontext()  # once for all nested sessions
        with forwarded, gateway.failures_as_text(log), _jobs_ended(session):
            yield session


def _find() -> SparkSession | None:
    """Return the running session of this process, if there is one."""
    _forget_dead_jvm()
    if SparkContext._active_spark_context is None:
        return None
    # In a thread that has not used the session, it is not active.
    found = SparkSession.getActiveSession() or SparkSession._instantiatedSession
    return found or SparkSession(SparkContext._active_spark_context)  # A caller may have a context alone.


def _find_or_start(config: SparkConfig, storage: Storage, log: Path) -> SparkSession:
    session, wanted = _find(), (threading.get_ident(), config, storage.home)
    if session is not None and _state.session is None:
        check_callers_session(session)
        return session
    started = _state.started_by or wanted
    if session is not None and _state.uses == 1 and started[0] != wanted[0] and started[1:] != wanted[1:]:
        _stop(session)  # Kept for a run in another thread.
        session = None
    if session is None:
        session = _start(config, storage, log)
        _state.session, _state.started_by = session, wanted
    return session


@contextmanager
def _jobs_ended(session: SparkSession) -> Iterator[None]:
    """Cancel the session's jobs if the block fails: a time limit ends the block's thread, but not what the JVM does.

    A kept session would otherwise continue a job beside its retry, and commit it after the lock was released.
    """
    try:
        yield
    except BaseException:
        if gateway.jvm_is_alive():
            # The connection of this thread may be left in the middle of an answer; another thread has its own.
            canceller = threading.Thread(target=session.sparkContext.cancelAllJobs)
            canceller.start()
            canceller.join()
        raise


def _start(config: SparkConfig, storage: Storage, log: Path) -> SparkSession:
    gateway.stop_jvm()  # That of a session which its caller has stopped: it has another class path and heap.
    submitted = gateway.submitted_settings()
    master = session_master(config, submitted)
    java = "" if submitted else check_java()
    os.environ["PYSPARK_PYTHON"] = python_of_workers(config, master)
    name_files_in_utf8()
    if is_local(master):  # On a cluster, executors have their own temporary folders.
        _state.scratch = Scratch(scratch_root(storage))
    scratch = None if _state.scratch is None else _state.scratch.folder
    try:
        settings = session_settings(config, storage, master, scratch, java, submitted)
        builder = SparkSession.builder.master(master).appName("lakevision").config(map=dict(settings))
        rotate(log)
        with stderr_into(log):
            if is_authenticated_by_secret(master):
                gateway.start_authenticated_jvm(settings)
            session = builder.getOrCreate()
    except BaseException as error:
        failed = gateway.start_failure(error, config.conf, log)
        _stop_jvm()  # It may be running without a session; a retry starts another.
        raise failed from None
    session.sparkContext.setLogLevel("ERROR")
    # Of the Python workers alone; a setting spark.executorEnv would be that of an executor's JVM as well.
    for name, value in worker_memory().items():
        session.sparkContext.environment.setdefault(name, value)
    return session


def preload(spark: SparkSession, module: str) -> None:
    """Start the daemon of the Python workers with a module that the functions of the next jobs need.

    It returns at once: the workers start beside what the driver and the JVM do before the first job needs them.
    Functions that were made before have other workers. On a cluster nothing is done, since an executor may lack this
    package when its daemon starts.

    Args:
        spark: The session.
        module: Name of the module. Its import must not start threads or CUDA, which a forked process would lack.
    """
    context = spark.sparkContext
    if not is_local(str(context.master)) or context.environment.get(PRELOAD) == module:
        return
    context.environment[PRELOAD] = module  # Spark has a daemon for each environment.
    nothing = spark.range(0, 1, 1, 1).mapInArrow(lambda batches: batches, "id long")

    def start() -> None:
        # Cancelled with the work that needs it; a daemon that cannot start fails the job of that work.
        with suppress(Py4JError, PySparkException, OSError):
            nothing.collect()

    threading.Thread(target=start, name="lakevision-preload", daemon=True).start()


class NeedsSpark(Exception):
    """Signal to `try_without_spark` that the work needs a Spark session; it never reaches a user."""


def try_without_spark(
    work: Callable[[SparkSession | None], Result], config: SparkConfig, storage: Storage, *, even_if_open: bool = False
) -> Result:
    """Call `work` without a session, which takes seconds to start, and again with one if it raises NeedsSpark.

    A session that is already open is used at once: trying without it first would do half of the work twice.

    Args:
        work: Takes a session or None; raises NeedsSpark before it has changed anything if it needs a session.
        config: As `spark_session`.
        storage: As `spark_session`.
        even_if_open: Whether work that is faster without a session is tried without one although one is open.

    Raises:
        WrongInput: As `spark_session`.
        ClusterUnavailable: As `spark_session`.
        SparkFailed: As `spark_session`.
    """
    if even_if_open or not _is_open():
        try:
            return work(None)
        except NeedsSpark:
            pass  # The handler ends before the second try, or the data read by the first would stay in memory.
    with spark_session(config, storage) as session:
        return work(session)


def _is_open() -> bool:
    """Return whether there is a session that this thread can use at once."""
    if not _state.turn.acquire(blocking=False):
        return False
    try:
        return _find() is not None
    finally:
        _state.turn.release()


def _stop(session: SparkSession) -> None:
    _state.session = None
    if gateway.jvm_is_alive():
        try:
            session.stop()
        except (Py4JError, OSError):
            if not gateway.has_lost_jvm():
                raise
    if gateway.jvm_is_alive():
        _stop_jvm()
    else:
        _forget_dead_jvm()


def _forget_dead_jvm() -> None:
    if gateway.forget_dead_jvm():
        _state.session = None
        _remove_scratch()


def _stop_jvm() -> None:
    gateway.stop_jvm()
    _remove_scratch()


def _forget_parents_session() -> None:
    """Let a forked process start a session of its own: answers to both processes would mix on one connection."""
    global _state  # noqa: PLW0603  # the state of the process, which is another one now
    gateway.keep_parents_objects(_state)
    _state = _SessionState()


os.register_at_fork(after_in_child=_forget_parents_session)


def _remove_scratch() -> None:
    if _state.scratch is not None:
        _state.scratch.remove()
        _state.scratch = None
