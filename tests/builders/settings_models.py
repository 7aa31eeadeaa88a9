"""The models of all settings, found in their modules."""

import importlib
import pkgutil

import tasks.config
from tasks.config.frozen import FrozenConfig
from tasks.config.recipe import PhaseTrain


def all_models() -> list[type[FrozenConfig]]:
    """Return the models of all settings and flow parameters; imports every module of `tasks.config`."""
    package = "tasks.config"
    for module in pkgutil.iter_modules(tasks.config.__path__, f"{package}."):
        importlib.import_module(module.name)
    found = [FrozenConfig]
    for model in found:
        # Other packages derive models, too, such as the command line's parser.
        # Those of a phase are chosen by the recipe, and no user gives them.
        found += [
            one for one in model.__subclasses__() if one.__module__.startswith(f"{package}.") and one is not PhaseTrain
        ]
    return list(dict.fromkeys(found[1:]))
