"""Ranks that average their gradients with torch's DistributedDataParallel, over Gloo or NCCL."""

import json
from contextlib import ExitStack, closing
from datetime import timedelta
from http import HTTPStatus
from http.client import HTTPConnection
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from tasks.collectives.reducer import SENT_TYPES, Reducer
from tasks.config.distributed import GradientCompression
from tasks.environment import Rendezvous
from tasks.progress.activity import waiting_for_ranks
from tasks.system.cores import gpu_obstacle


class LauncherStore(distributed.Store):  # type: ignore[name-defined,misc]  # torch does not type it
    """The launcher's store of the ranks' addresses, as a store of torch."""

    def __init__(self, rendezvous: Rendezvous, timeout_seconds: float) -> None:
        """Note where the store is.

        Args:
            rendezvous: Address and secret of the launcher's store.
            timeout_seconds: Maximum time for which a rank waits for another one's value.
        """
        super().__init__()
        self._rendezvous, self._timeout_seconds = rendezvous, timeout_seconds
        self._clones: list[LauncherStore] = []

    def _ask(self, operation: str, *arguments: Any) -> Any:
        """Return the answer of the launcher's store to an operation; bytes travel as their numbers.

        Raises:
            ConnectionError: The launcher has ended, or this rank has another secret.
        """
        # A connection per request: torch's threads share a store. The launcher bounds each wait.
        with closing(HTTPConnection(self._rendezvous.host, self._rendezvous.port)) as connection:
            request = json.dumps([operation, arguments], default=list)
            connection.request("POST", f"/{self._rendezvous.secret}", request)
            response = connection.getresponse()
            if response.status != HTTPStatus.OK:
                raise ConnectionError(f"the launcher's store of the ranks' addresses refused '{operation}'")
            return json.loads(response.read())

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._ask("set", key, _encoded(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key once there is one."""
        self.wait([key])
        return bytes(self._ask("get", key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until there are values for all keys.

        Raises:
            TimeoutError: They were not set in time; the message names the first one.
        """
        seconds = self._timeout_seconds if timeout is None else timeout.total_seconds()
        if not self._ask("wait", keys, seconds):
            raise TimeoutError(f"no rank set '{keys[0]}' within {seconds:.0f} s")

    def check(self, keys: list[str]) -> bool:
        """Return whether there are values for all keys."""
        return bool(self._ask("wait", keys, 0))

    def add(self, key: str, amount: int) -> int:
        """Add to the number of a key; return the sum."""
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Set the value of a key if it is the expected one; return the value."""
        return bytes(self._ask("compare_and_set", key, _encoded(expected), _encoded(value)))

    def deleteKey(self, key: str) -> bool:  # noqa: N802  # torch's name
        """Delete a key; return whether it existed."""
        return bool(self._ask("delete", key))

    def getNumKeys(self) -> int:  # noqa: N802  # torch's name
        """Return the number of keys."""
        return int(self._ask("count"))

    def clone(self) -> "LauncherStore":
        """Return a store of the same values."""
        self._clones.append(LauncherStore(self._rendezvous, self._timeout_seconds))
        return self._clones[-1]  # Kept: torch's own references do not keep the Python part alive.


def _encoded(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class ModelOrNothing(nn.Module):
    """A model, and a pass without inputs that gives every trained parameter a gradient of zero."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor | None) -> torch.Tensor:
        """Return the model's outputs, or a zero, (), that depends on its parameters; no buffer changes for that."""
        if inputs is not None:
            outputs: torch.Tensor = self.model(inputs)
            return outputs
        # Sums of no elements: zero even of parameters that are not finite.
        sums = [parameter.flatten()[:0].sum() for parameter in self.model.parameters() if parameter.requires_grad]
        return torch.stack(sums).sum()


class TorchReducer(Reducer):
    """Reducer over the ranks of a process group of torch."""

    def __init__(
        self, rendezvous: Rendezvous, timeout_seconds: float, compression: GradientCompression = "none"
    ) -> None:
        """Wait for the other ranks.

        Args:
            rendezvous: Number of this rank, and the launcher's server of the ranks' addresses.
            timeout_seconds: Maximum time of a collective operation.
            compression: Number format in which gradients are sent.
        """
        self.rank, self.num_ranks = rendezvous.rank, rendezvous.num_ranks
        has_nccl = distributed.is_nccl_available()
        self.gpu_obstacle = gpu_obstacle("torch", has_nccl, rendezvous.local_size, torch.cuda.device_count())
        self._sent_type = SENT_TYPES[compression]
        self._averaging: DistributedDataParallel | None = None
        self._hook: RemovableHandle | None = None
        self._num_passes = 0
        self._waiting = ExitStack()
        with waiting_for_ranks():
            self._store = LauncherStore(rendezvous, timeout_seconds)
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if has_nccl and torch.cuda.is_available() else "gloo",
                store=self._store,
                rank=self.rank,
                world_size=self.num_ranks,
                timeout=timedelta(seconds=timeout_seconds),
            )

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        summed = values.detach().clone(memory_format=torch.contiguous_format)
        with waiting_for_ranks():
            distributed.all_reduce(summed)
        return summed

    def broadcast(self, values: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Return the tensor of the rank `root` on every rank."""
        sent = values.detach().clone(memory_format=torch.contiguous_format)
        with waiting_for_ranks():
            distributed.broadcast(sent, root)
        return sent

    def broadcast_model(self, model: nn.Module) -> None:
        """Copy the parameters and buffers of rank 0 to every rank."""
        for value in model.state_dict().values():
            value.copy_(self.broadcast(value))

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model in DistributedDataParallel, the same until `release_model`."""
        if self._averaging is not None and self._averaging.module.model is model:
            return self._averaging
        self._averaging = DistributedDataParallel(
            ModelOrNothing(model),
            # The ranks have the same weights, and the loop averages batch norm's statistics.
            init_sync=False,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )
        if self._sent_type is not None:
            self._averaging.register_comm_hook(None, self._send_compressed)
        self._num_passes = 0
        self._averaging.register_forward_pre_hook(self._before_pass)
        # Usually the last gradient of a backward pass.
        first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        self._hook = first.register_post_accumulate_grad_hook(self._after_last_gradient)  # type: ignore[no-untyped-call]  # torch does not type it
        return self._averaging

    def release_model(self) -> None:
        """Release the wrapped model, and with it the hooks that send its gradients."""
        if self._hook is not None:
            self._hook.remove()
        self._averaging = self._hook = None

    def _before_pass(self, _module: nn.Module, _inputs: Any) -> None:
        self._num_passes += 1
        if self._num_passes == 2:
            # DistributedDataParallel now agrees on the order of its buckets. Without this line, a rank that waits for
            # the others there would seem to compute.
            self.sum(torch.zeros(1))

    def _after_last_gradient(self, _parameter: torch.Tensor) -> None:
        self._waiting.enter_context(waiting_for_ranks())

    def _send_compressed(
        self,
        _state: None,
        bucket: distributed.GradBucket,  # type: ignore[name-defined]  # torch does not type it, and checks it
    ) -> torch.futures.Future[torch.Tensor]:
        """Average the gradients of a bucket in the data type of the setting."""
        gradients: torch.Tensor = bucket.buffer()
        sent = gradients.to(self._sent_type).div_(self.num_ranks)
        sending: torch.futures.Future[list[torch.Tensor]] = distributed.all_reduce(sent, async_op=True).get_future()
        return sending.then(lambda sent: gradients.copy_(sent.value()[0]))

    def backward(self, loss: torch.Tensor | None) -> None:
        """Compute the gradients of this rank's images, and average them over all ranks."""
        if loss is None:
            assert self._averaging is not None, "the model was wrapped before its backward pass"
            loss = self._averaging(None)
        with self._waiting:
            super().backward(loss)

    def shut_down(self) -> None:
        """Leave the process group once all ranks have finished, so that none sees another one's end as a failure."""
        self.sum(torch.zeros(1))
        distributed.destroy_process_group()
