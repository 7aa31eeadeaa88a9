"""The daemon from which a local Spark forks its Python workers: it imports once what each of them needs for seconds.

Spark runs it in place of `pyspark.daemon`, with the same argument.
"""

import importlib
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def leave_out_archives(paths: list[str]) -> None:
    """Remove Spark's own archives from a module search path where PySpark is installed as a folder.

    Spark puts pyspark.zip and a jar first. Each task of a worker would read their lists of files, once for every
    package in them: about 0.3 s of CPU time (LOG.md). Modules of an archive are also compiled in each daemon.

    Args:
        paths: The path, such as `sys.path`; changed in place.
    """
    # By os.path, since pathlib raises an error for a folder that may not be searched.
    found = PathFinder.find_spec("pyspark", [path for path in paths if os.path.isdir(path)])
    if found is None or found.origin is None:
        return
    installed = Path(found.origin).resolve().parent
    for path in [path for path in paths if os.path.isfile(path)]:
        if Path(path).resolve().is_relative_to(installed):
            paths.remove(path)
            sys.path_importer_cache.pop(path, None)


if __name__ == "__main__":
    leave_out_archives(sys.path)
    from tasks.environment import module_to_preload  # imports others, which would be looked for in the archives

    if name := module_to_preload():
        importlib.import_module(name)
    from pyspark.daemon import manager

    manager()
