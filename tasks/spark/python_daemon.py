"""The daemon from which a local Spark forks its Python workers: it imports once what each of them needs for seconds.

Spark runs it in place of `pyspark.daemon`, with the same argument.
"""

import importlib

from tasks.environment import module_to_preload

if __name__ == "__main__":
    if name := module_to_preload():
        importlib.import_module(name)
    from pyspark.daemon import manager

    manager()  # type: ignore[no-untyped-call]  # PySpark's own has no types
