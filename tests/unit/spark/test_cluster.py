"""Settings of sessions on a Spark cluster, without Spark."""

import socket
import sys

import pytest

from tasks.config.storage import SparkConfig
from tasks.errors import ClusterUnavailable, WrongInput
from tasks.spark.cluster import cluster_settings, is_in_driver, is_local, python_of_workers, session_master
from tasks.system.listening import free_port


@pytest.fixture
def master(monkeypatch):
    """Return the URL of a master of which only the port exists, without Spark's variables in the environment."""
    for name in ("_SPARK_AUTH_SECRET", "SPARK_LOCAL_IP", "PYSPARK_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"spark://127.0.0.1:{server.getsockname()[1]}"


def test_driver_binds_to_the_address_that_reaches_the_master_and_has_no_ui(master: str) -> None:
    """The driver's UI has no login, and executors reach the driver where it reaches the master."""
    assert cluster_settings(master, {}) == {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }
    assert cluster_settings("yarn", {}) == {"spark.ui.enabled": "false"}


def test_address_of_the_user_is_kept(master: str, monkeypatch) -> None:
    """spark.driver.host and Spark's own variable SPARK_LOCAL_IP choose another address."""
    assert "spark.driver.bindAddress" not in cluster_settings(master, {"spark.driver.host": "driver.example"})
    monkeypatch.setenv("SPARK_LOCAL_IP", "192.0.2.7")
    assert "spark.driver.host" not in cluster_settings(master, {})


def test_second_of_two_masters_is_used_if_the_first_does_not_answer(master: str) -> None:
    """A highly available cluster has several masters in its URL."""
    both = f"spark://127.0.0.1:{free_port()},{master.removeprefix('spark://')}"
    assert cluster_settings(both, {})["spark.driver.host"] == "127.0.0.1"


def test_secret_in_the_environment_turns_on_authentication_and_encryption(
    master: str, monkeypatch, messages_of
) -> None:
    """The secret itself is not a setting: settings are on the command line of the JVM."""
    monkeypatch.setenv("_SPARK_AUTH_SECRET", "hush")
    found = cluster_settings(master, {})
    assert (found["spark.authenticate"], found["spark.network.crypto.enabled"]) == ("true", "true")
    assert "hush" not in str(found)
    assert messages_of("lakevision.spark") == []


def test_cluster_without_authentication_is_warned_about(master: str, messages_of) -> None:
    """Without a secret, any client of the ports can run code."""
    cluster_settings(master, {"spark.authenticate": "true"})
    assert messages_of("lakevision.spark") == []
    cluster_settings(master, {})
    (message,) = messages_of("lakevision.spark")
    assert message.startswith(f"'{master}' is used without authentication")


def test_master_that_does_not_answer_or_exist_is_named() -> None:
    """A master that is down may come back, so its error is retried; an unknown host is wrong input."""
    down = f"spark://127.0.0.1:{free_port()}"
    with pytest.raises(ClusterUnavailable, match=rf"'{down}' does not answer \(.*refused\)") as refused:
        cluster_settings(down, {})
    assert refused.value.setting == "spark.master"
    with pytest.raises(WrongInput, match="whose host 'no-such-host.invalid' is unknown"):
        cluster_settings("spark://no-such-host.invalid:7077", {})


def test_name_server_that_does_not_answer_is_not_wrong_input(master: str, monkeypatch) -> None:
    """A retry may resolve the name, and another master of the same URL is used meanwhile."""
    connect = socket.create_connection

    def no_name_server(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[0] == "master.example":
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", no_name_server)
    with pytest.raises(ClusterUnavailable, match=r"master.example:7077: Temporary failure in name resolution"):
        cluster_settings("spark://master.example:7077", {})
    both = f"spark://master.example:7077,{master.removeprefix('spark://')}"
    assert cluster_settings(both, {})["spark.driver.host"] == "127.0.0.1"


def test_master_of_spark_submit_is_used_and_another_one_is_refused() -> None:
    """spark-submit has started the JVM for its own master."""
    given = {"spark.master": "spark://one:7077"}
    assert session_master(SparkConfig(), given) == "spark://one:7077"
    assert session_master(SparkConfig(master="spark://one:7077"), given) == "spark://one:7077"
    assert session_master(SparkConfig(master="yarn"), {}) == "yarn"
    with pytest.raises(WrongInput, match=r"'yarn', but .* 'spark://one:7077'") as refused:
        session_master(SparkConfig(master="yarn"), given)
    assert refused.value.setting == "spark.master"


def test_executors_use_the_python_that_is_set_for_them(master: str, monkeypatch) -> None:
    """Executors of a cluster may have Python elsewhere; local ones have this interpreter."""
    unpacked = SparkConfig(conf={"spark.pyspark.python": "./environment/bin/python"})
    assert python_of_workers(unpacked, master) == "./environment/bin/python"
    assert python_of_workers(SparkConfig(), master) == sys.executable
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/venv/bin/python")
    assert python_of_workers(SparkConfig(), master) == "/opt/venv/bin/python"
    assert python_of_workers(SparkConfig(), "local[*]") == sys.executable


@pytest.mark.parametrize(
    ("master", "expected"),
    [("local[*]", (True, True)), ("local-cluster[2,1,1024]", (True, False)), ("yarn", (False, False))],
)
def test_local_masters(master: str, expected: tuple[bool, bool]) -> None:
    """Executors of a local master are on this machine, in the driver's process or not."""
    assert (is_local(master), is_in_driver(master)) == expected
