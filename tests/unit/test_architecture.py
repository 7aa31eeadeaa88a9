"""The rules that keep it a house, read off the source and off fresh interpreters."""

import ast
import json
import re
import shutil
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from deployments.checks.readme import TREE, described_files, readmes, with_trees
from tasks.model_package import REQUIREMENTS
from tests.builders.processes import ROOT, bare_environment, run_python

LOADED_BY_RANKS_AND_EXECUTORS = (
    "tasks.launch.rank",
    "tasks.etl.extract",
    "tasks.cache.write",
    "tasks.predict.batch",
)

CODE = ("flows", "tasks")
DESCRIBED = ("flows", "tasks", "deployments", "docker")
"""Folders whose every file a reader may open."""

needs_git = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(),
    reason="needs git and a checkout, to know which files are tracked",
)

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "base", "common", "misc"}


def sources(*folders: str) -> list[Path]:
    """Return the Python files below the folders."""
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def module_name(file: Path) -> str:
    """Return the name under which the file is imported."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(file: Path) -> set[str]:
    """Return the top-level packages that the file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Import everything in a fresh interpreter, modules of ranks and executors first, and return its state."""
    folder = tmp_path_factory.mktemp("imported")
    work, home = folder / "work", folder / "home"
    work.mkdir()
    home.mkdir()
    names = [module_name(file) for file in sources(*CODE)]
    program = f"""
import importlib, json, os, sys
before = dict(os.environ)
for name in {LOADED_BY_RANKS_AND_EXECUTORS!r}:
    importlib.import_module(name)
prefect = sorted(name for name in sys.modules if name.split(".")[0] == "prefect")
drawing = sorted({{name.split(".")[0] for name in sys.modules}} & {{"matplotlib", "tensorboard"}})
for name in {names!r}:
    importlib.import_module(name)
import mlflow, psutil
from pyspark import SparkContext
from pyspark.sql import SparkSession
print(json.dumps({{
    "prefect": prefect,
    "drawing": drawing,
    "imported": sorted(sys.modules),
    "spark_context": SparkContext._active_spark_context is not None,
    "spark_session": SparkSession.getActiveSession() is not None,
    "mlflow_run": mlflow.active_run() is not None,
    "children": [child.name() for child in psutil.Process().children(recursive=True)],
}}))
"""
    done = run_python("-c", program, environment=bare_environment(home, str(ROOT)), timeout=120, cwd=work)
    assert done.returncode == 0, done.stderr
    left = [*work.rglob("*"), *home.rglob("*lakevision*")]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"left": [str(path) for path in left], "names": names}


def test_ranks_and_executors_do_not_load_prefect(imported: dict[str, Any]) -> None:
    """Ranks and Spark workers import no Prefect, which would cost seconds and a server."""
    assert imported["prefect"] == []


def test_ranks_and_executors_do_not_load_what_draws(imported: dict[str, Any]) -> None:
    """One rank draws, once, at the end: none pays for matplotlib and TensorBoard at its start."""
    assert imported["drawing"] == []


def test_demo_loads_no_torch_before_its_server_starts(tmp_path: Path) -> None:
    """The demo's own models need no check; an unknown model from the user is refused at once."""
    program = """
import sys
from deployments.demo import main, check_parameters, parameters, parse_arguments
check_parameters(parameters(parse_arguments([])), None)
print({"torch", "mlflow", "pandas"} & set(sys.modules))
print(main(["--model", "resnet0"]))
"""
    done = run_python("-c", program, environment=bare_environment(tmp_path, str(ROOT)), timeout=120)
    assert done.stdout.split("\n")[:2] == ["set()", "2"], done.stderr
    assert "train.model is 'resnet0'" in done.stderr


def test_flows_load_no_torch(tmp_path: Path) -> None:
    """Workers' runs and the registration of deployments import every flow; stages that need torch load it then."""
    names = [module_name(file) for file in sources("flows")]
    program = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
print({{"torch", "torchvision", "petastorm", "matplotlib"}} & set(sys.modules))
"""
    done = run_python("-c", program, environment=bare_environment(tmp_path, str(ROOT)), timeout=120)
    assert done.stdout.splitlines()[-1:] == ["set()"], (done.stdout, done.stderr)


def test_flow_that_starts_ranks_on_a_given_cache_loads_neither_mlflow_nor_tables(tmp_path: Path) -> None:
    """Its ranks would wait for these imports, which take seconds."""
    program = """
import sys
import flows.train_distributed
print({"mlflow", "duckdb", "deltalake", "pandas"} & set(sys.modules))
"""
    done = run_python("-c", program, environment=bare_environment(tmp_path, str(ROOT)), timeout=120)
    assert done.stdout.splitlines()[-1:] == ["set()"], (done.stdout, done.stderr)


def test_importing_leaves_no_file(imported: dict[str, Any]) -> None:
    """Every module was imported, and neither the current folder nor the home has anything of ours in it."""
    assert set(imported["names"]) <= set(imported["imported"])
    assert "tasks.model_package.decode" in imported["names"]
    assert imported["left"] == []


def test_importing_starts_nothing(imported: dict[str, Any]) -> None:
    """No Spark session, no MLflow run and no process are there after everything was imported."""
    assert {name: imported[name] for name in ("spark_context", "spark_session", "mlflow_run", "children")} == {
        "spark_context": False,
        "spark_session": False,
        "mlflow_run": False,
        "children": [],
    }


def test_fluent_api_of_mlflow_is_not_used() -> None:
    """Its URIs, active run and environment variables are those of other work in the same process."""
    used = {
        node.attr
        for file in sources("tasks", "flows", "deployments")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mlflow"
    }

    assert used <= {"MlflowClient", "pyfunc"}


def test_model_package_stands_alone() -> None:
    """The code that travels with a model imports its own modules by relative imports, and what it requires."""
    files = sources("tasks/model_package")
    distributions = packages_distributions()
    outside = set().union(*map(imported_names, files)) - set(sys.stdlib_module_names)
    required = {name.lower().replace("_", "-") for module in outside for name in distributions[module]}

    assert len(files) > 6
    assert required == set(REQUIREMENTS)
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    levels = [node.level for node in nodes if isinstance(node, ast.ImportFrom) and node.level]
    assert levels
    assert set(levels) == {1}


UNPICKLING = re.compile(
    r"((c|cloud)?pickle|dill|joblib)\.(loads?|Unpickler)|.*\b(broadcast|all_?gather|gather|scatter|recv)_object(_list)?"
)
"""Functions that run code which a file or a message contains."""


def test_nothing_is_unpickled() -> None:
    """Files and messages of other processes are data: no pickle is loaded, and torch and NumPy refuse objects."""
    for file in sources(*CODE, "deployments"):
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert not UNPICKLING.fullmatch(name), f"{file}:{call.lineno}"
            assert given.get("allow_pickle", "False") == "False", f"{file}:{call.lineno}"
            assert given.get("weights_only", "False" if name == "torch.load" else "True") == "True", (
                f"{file}:{call.lineno}"
            )


def test_only_one_module_reads_the_environment() -> None:
    """Settings have one way in beside the form; what passes a whole environment on, or sets it, reads none of it."""
    reading = re.compile(r"os\.environ(\.get|\[)|os\.getenv|load_dotenv")

    readers = {file.relative_to(ROOT).as_posix() for file in sources(*CODE) if reading.search(file.read_text())}

    assert readers <= {"tasks/environment.py", "tasks/spark/session.py"}


def test_every_ignored_rule_has_its_reason() -> None:
    """A comment after `noqa` and `type: ignore` states why."""
    bare = re.compile(r"# (noqa(: [A-Z0-9, ]+)?|type: ignore(\[[a-z, -]+\])?)$", re.MULTILINE)
    files = sources("flows", "tasks", "deployments", "tests")

    assert len(files) > 400
    assert [str(file) for file in files if bare.search(file.read_text())] == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    """The name of a module states its purpose."""
    assert [str(file) for file in sources(*DESCRIBED) if file.stem in VAGUE_NAMES] == []


def test_no_module_shadows_a_package() -> None:
    """A file called horovod.py or a package called docker would hide the installed package of that name."""
    installed = set(packages_distributions()) | {"docker", "horovod"}
    assert {"petastorm", "prefect", "torch"} <= installed

    named = {file.relative_to(ROOT) for file in sources(*DESCRIBED)}
    named |= {file.parent for file in named} - {Path(folder) for folder in DESCRIBED}
    # delta-spark's package is called delta as well; nothing ever puts tasks/tables on sys.path.
    shadows = {path.as_posix() for path in named if path.stem in installed} - {"tasks/tables/delta.py"}

    assert shadows == set()
    assert not (ROOT / "docker" / "__init__.py").exists()


def test_no_top_level_name_shadows_the_standard_library() -> None:
    """Modules at the top level are importable by their bare names where the checkout is on sys.path."""
    importable = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}

    assert set(CODE) <= importable
    assert importable & set(sys.stdlib_module_names) == set()


def test_every_package_is_one() -> None:
    """A folder with modules has an __init__.py, without which the wheel leaves it out or finds another's."""
    folders = {file.parent for file in sources(*CODE)}

    assert sorted(str(folder) for folder in folders if not (folder / "__init__.py").is_file()) == []


def folders_with_trees() -> dict[str, Path]:
    """Return the README of each folder that one has a tree of."""
    found = [(tree[2], readme) for readme in readmes() for tree in TREE.finditer(readme.read_text())]
    assert len(dict(found)) == len(found), "two READMEs have a tree of one folder"
    return dict(found)


@needs_git
def test_every_file_that_a_reader_may_open_is_in_a_tree() -> None:
    """Of a folder of its own README, or of one above it."""
    assert folders_with_trees().keys() >= set(DESCRIBED)
    for folder, readme in folders_with_trees().items():
        assert (ROOT / folder).is_relative_to(readme.parent)
        assert described_files(folder), f"{readme} has a tree of '{folder}', where no file is"


@needs_git
def test_no_tree_is_stale() -> None:
    """Paths and descriptions are those of the files; `make readme` writes them."""
    stale = [readme for readme in readmes() if with_trees(readme.read_text()) != readme.read_text()]
    assert stale == [], "run make readme"


@pytest.mark.parametrize("dockerfile", sorted((ROOT / "docker").glob("Dockerfile.*")), ids=lambda file: file.suffix)
def test_an_image_gives_set_up_all_that_it_imports(dockerfile: Path, tmp_path: Path) -> None:
    """Set-up runs before the code is copied, so that an edit does not start it again: what it needs comes first."""
    before = dockerfile.read_text().split("deployments/setup/setup.sh", maxsplit=2)
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", "deployments/setup/setup.sh".join(before[:2]), flags=re.MULTILINE)
    patterns = [pattern for line in copied for pattern in line.split()]
    program = (
        "import sys, deployments.setup.fetch_jars\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] in ('tasks', 'deployments')), sep='\\n')"
    )
    done = run_python("-c", program, environment=bare_environment(tmp_path, str(ROOT)), timeout=120, cwd=tmp_path)

    needed = {Path(line).relative_to(ROOT) for line in done.stdout.splitlines()}
    assert Path("tasks/spark/jvm.py") in needed
    lacking = {
        file for file in needed if not any(file.match(pattern) or file.is_relative_to(pattern) for pattern in patterns)
    }
    assert lacking == set()
