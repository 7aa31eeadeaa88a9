"""What tells pretrained weights from others."""

import hashlib
from functools import lru_cache
from pathlib import Path


def weights_digest(name: str, weights: str) -> str:
    """Return what tells weights from others, whatever they are called here or by torchvision.

    That is the sha256 of a state dict's file. Of DEFAULT it is the name of the file that torchvision downloads, in
    which the beginning of its sha256 is: with another torchvision it may be another. What names no file is returned
    as it is.

    Raises:
        WrongInput: DEFAULT of a model that torchvision does not know.
    """
    if weights == "DEFAULT":
        from tasks.train.model import default_weights  # Here: torchvision takes seconds to load, and only this asks it.

        return str(default_weights(name).url).rpartition("/")[2]
    path = Path(weights).expanduser()
    if weights == "none" or not path.is_file():
        return weights
    facts = path.stat()
    return _file_digest(path, facts.st_size, facts.st_mtime_ns)


@lru_cache
def _file_digest(path: Path, _size: int, _modified_ns: int) -> str:
    """Digest a file once a process, and again when its size or time changed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
