"""Errors of training processes that run out of memory."""

import numpy as np
import pytest
import torch

from tasks.config.train import TrainConfig
from tasks.errors import OutOfMemory, error_record, is_retried, restored_error
from tasks.model_package.serving import is_out_of_memory
from tasks.train.run import translate_out_of_memory

TRAIN = TrainConfig(batch_size=64)

OTHER_LIBRARIES = (
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "NCCL error in: ProcessGroupNCCL.cpp: unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
    "GET was unable to find an engine to execute this computation",
)
"""Errors of CUDA, NCCL and cuDNN without memory."""


def test_memory_that_torch_cannot_allocate_is_explained() -> None:
    """The error names rank and size, the setting and its value; it is not retried, in a submitted run neither."""
    with pytest.raises(OutOfMemory) as raised, translate_out_of_memory(TRAIN, 1):
        torch.empty(2**52, dtype=torch.uint8)

    assert str(raised.value) == (
        f"rank 1 ran out of memory when it asked for {2**52} bytes: lower train.batch_size, which is 64, or set it to "
        "auto; a higher train.accumulate_steps keeps the images per step"
    )
    assert raised.value.way_out.startswith("lower train.batch_size")
    restored = restored_error(error_record(raised.value))
    assert type(restored) is OutOfMemory
    assert not is_retried(restored)


@pytest.mark.parametrize(
    ("batch_size", "advice"),
    [
        (1, "use a smaller train.model or cache.image_size"),
        ("auto", "lower train.batch_size, which is auto; a higher train.accumulate_steps keeps the images per step"),
    ],
)
def test_advice_fits_the_batch_size(batch_size: object, advice: str) -> None:
    """A batch of one image cannot be lowered, and auto is not an advice for auto."""
    train = TRAIN.model_copy(update={"batch_size": batch_size})
    with pytest.raises(OutOfMemory, match=f"^rank 0 ran out of memory: {advice}$"), translate_out_of_memory(train, 0):
        raise MemoryError


def test_errors_of_gpus_and_numpy_are_recognised() -> None:
    """By their class, or by the text of a library; other errors are not."""
    gpu = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"
    with pytest.raises(OutOfMemory, match=r"when it asked for 2\.00 GiB: lower"), translate_out_of_memory(TRAIN, 0):
        raise torch.OutOfMemoryError(gpu)
    with pytest.raises(MemoryError) as raised:
        np.empty(2**60, dtype=np.uint8)
    assert is_out_of_memory(raised.value)
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    for text in OTHER_LIBRARIES:
        assert is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(RuntimeError("could not create a primitive"))
    assert not is_out_of_memory(RuntimeError("could not create a primitive descriptor for a convolution"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="^shapes$"), translate_out_of_memory(TRAIN, 0):
        raise RuntimeError("shapes")
