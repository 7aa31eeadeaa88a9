"""Reasons why ranks cannot exchange gradients on GPUs."""

from tasks.config.distributed import Backend
from tasks.errors import WrongInput


def gpu_obstacle(backend: Backend, has_nccl: bool, num_ranks: int, num_gpus: int) -> WrongInput | None:
    """Return the reason why ranks on this machine cannot exchange gradients on GPUs, with the way out, or None.

    Args:
        backend: Library that exchanges the gradients.
        has_nccl: Whether it was built with NCCL; without it, a rank with tensors on a GPU fails.
        num_ranks: Ranks on this machine.
        num_gpus: GPUs that torch sees; NCCL does not support two ranks on one GPU.
    """
    if not has_nccl and backend == "horovod":
        return WrongInput(
            "Horovod was built without NCCL",
            way_out="run 'HOROVOD_GPU_OPERATIONS=NCCL make setup', or set distributed.backend to torch",
        )
    if not has_nccl:
        return WrongInput("torch was built without NCCL", way_out="install its build for CUDA")
    if num_ranks > num_gpus:
        return WrongInput(
            f"{num_ranks} ranks share this machine and there are {num_gpus} GPUs", way_out="give at most as many ranks"
        )
    return None


def expected_gpu_obstacle(backend: Backend, num_ranks: int) -> WrongInput | None:
    """Return the obstacle of ranks that would be started on this machine now, or None without a GPU."""
    import torch

    if num_ranks == 1 or not torch.cuda.is_available():
        return None
    if backend == "torch":
        has_nccl = torch.distributed.is_nccl_available()
    else:
        import horovod.torch as hvd  # Here: it takes seconds to load. `nccl_built` needs no other ranks.

        has_nccl = hvd.nccl_built()
    return gpu_obstacle(backend, has_nccl, num_ranks, torch.cuda.device_count())
