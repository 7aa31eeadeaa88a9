"""The garbage collector of a local session's JVM."""

import shlex
import subprocess
from pathlib import Path

import pytest

from tasks.config.storage import SparkConfig
from tasks.environment import java_command
from tasks.spark import settings
from tasks.spark.jvm import java_options


def options_of(heap: str, scratch: Path) -> list[str]:
    """Return the options of the JVM of a session with this heap."""
    serial = settings.collects_serially(SparkConfig(driver_memory=heap))
    return shlex.split(java_options("", scratch, serial=serial))


@pytest.mark.parametrize(
    ("cores", "heap", "expected"), [(4, "4g", True), (5, "4g", False), (4, "4097m", False), (1, "512m", True)]
)
def test_one_thread_collects_a_small_heap_on_few_cores(
    cores: int, heap: str, expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """More cores and larger heaps have the collector that the JVM chooses."""
    monkeypatch.setattr(settings, "num_cores", lambda: cores)
    assert ("-XX:+UseSerialGC" in options_of(heap, tmp_path)) is expected


@pytest.mark.parametrize("variable", ["JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS"])
def test_collector_of_the_environment_wins(variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The JVM starts with it: it would not with a second one. Other options of the environment choose none."""
    monkeypatch.setattr(settings, "num_cores", lambda: 2)
    monkeypatch.setenv(variable, "-Dany=value -XX:+UseStringDeduplication")
    assert "-XX:+UseSerialGC" in options_of("1g", tmp_path)
    monkeypatch.setenv(variable, "-Dany=value -XX:+UseParallelGC")
    command = [java_command(), *options_of("1g", tmp_path), "-XX:+PrintFlagsFinal", "-version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr
    values = {line.split()[1]: line.split()[3] for line in done.stdout.splitlines() if line.count(" = ")}
    assert (values["UseParallelGC"], values["UseSerialGC"]) == ("true", "false")
    # Java reserves 48 MB for one compiler, which Spark's compiled code fills.
    assert (values["TieredStopAtLevel"], values["ReservedCodeCacheSize"]) == ("1", str(240 << 20))
