"""Reasons why ranks cannot train on GPUs."""

from tasks.config.distributed import Backend


def gpu_obstacle(backend: Backend, has_nccl: bool, num_ranks: int, num_gpus: int) -> str | None:
    """Return the reason why ranks on this machine cannot exchange gradients on GPUs, or None.

    Args:
        backend: Library that exchanges the gradients.
        has_nccl: Whether it was built with NCCL; without it, a rank with tensors on a GPU fails.
        num_ranks: Ranks on this machine.
        num_gpus: GPUs that torch sees; NCCL does not support two ranks on one GPU.
    """
    if not has_nccl and backend == "horovod":
        return (
            "Horovod was built without NCCL: run 'HOROVOD_GPU_OPERATIONS=NCCL make setup', or set distributed.backend "
            "to torch"
        )
    if not has_nccl:
        return "torch was built without NCCL: install its build for CUDA"
    if num_ranks > num_gpus:
        return f"{num_ranks} ranks share this machine and there are {num_gpus} GPUs: give at most as many ranks"
    return None


def expected_gpu_obstacle(backend: Backend, num_ranks: int) -> str | None:
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
