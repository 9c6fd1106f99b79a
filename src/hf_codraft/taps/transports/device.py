"""What the transports between GPUs need of a device, small enough that tests can play it on the CPU.

[`CudaLayer`] was not run on a GPU: it follows the documentation of torch and CUDA.
"""

from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
from torch import distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

StreamName = Literal["current", "side"]  # where the model computes; where taps are copied


class DeviceLayer(Protocol):
    """Memory, streams and events of this rank's device. A handle is what another process opens; it can be pickled.

    A handle is good while this process keeps what it stands for; so is what others have opened by it.
    """

    probe: Any
    """What [`export_probe`] showed to the other ranks last."""

    def allocate(self, num_bytes: int) -> torch.Tensor: ...
    def export_memory(self, memory: torch.Tensor) -> Any: ...
    def open_memory(self, handle: Any) -> torch.Tensor: ...

    def new_event(self, *, is_shared: bool = False) -> Any: ...
    def export_event(self, event: Any) -> Any: ...
    def open_event(self, handle: Any) -> Any: ...
    def record(self, event: Any, *, stream: StreamName) -> None: ...
    def wait(self, event: Any, *, stream: StreamName) -> None:
        """Lets the stream, not the host, wait for the latest record of the event; at once if there is none."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies on the side stream, which keeps `source` from being freed before."""

    def connect_pair(self, store: dist.Store, pair_rank: int, *, timeout_s: float) -> Any:
        """A communicator between two ranks, of which this one is 0 or 1; only they call this."""

    def send(self, tensor: torch.Tensor, *, pair: Any, to_rank: int) -> None:
        """Sends on the side stream, which keeps `tensor` from being freed before."""

    def receive(self, tensor: torch.Tensor, *, pair: Any, from_rank: int) -> None: ...
    def finish(self) -> None:
        """Waits for the side stream."""

    def disconnect(self, pair: Any) -> None: ...


class CudaLayer:
    """A [`DeviceLayer`] of a CUDA device. Not run on a GPU.

    Args:
        device (`torch.device`): of this rank's stages.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.probe: Any = None
        self._side = torch.cuda.Stream(device)

    def _stream(self, name: StreamName) -> torch.cuda.Stream:
        return self._side if name == "side" else torch.cuda.current_stream(self.device)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def export_memory(self, memory: torch.Tensor) -> Any:
        return reduce_tensor(memory)[1]

    def open_memory(self, handle: Any) -> torch.Tensor:
        return rebuild_cuda_tensor(*handle)

    def new_event(self, *, is_shared: bool = False) -> Any:
        return torch.cuda.Event(interprocess=is_shared)

    def export_event(self, event: Any) -> Any:
        return event.ipc_handle()

    def open_event(self, handle: Any) -> Any:
        return torch.cuda.Event.from_ipc_handle(self.device, handle)

    def record(self, event: Any, *, stream: StreamName) -> None:
        event.record(self._stream(stream))

    def wait(self, event: Any, *, stream: StreamName) -> None:
        event.wait(self._stream(stream))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._side)

    def connect_pair(self, store: dist.Store, pair_rank: int, *, timeout_s: float) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupNCCL(store, pair_rank, 2, options)

    def send(self, tensor: torch.Tensor, *, pair: Any, to_rank: int) -> None:
        with torch.cuda.stream(self._side):
            pair.send([tensor], to_rank, 0).wait()  # orders the side stream behind NCCL's; the host goes on
        tensor.record_stream(self._side)

    def receive(self, tensor: torch.Tensor, *, pair: Any, from_rank: int) -> None:
        with torch.cuda.stream(self._side):
            pair.recv([tensor], from_rank, 0).wait()

    def finish(self) -> None:
        self._side.synchronize()

    def disconnect(self, pair: Any) -> None:
        pair.abort()


def export_probe(layer: DeviceLayer | None) -> tuple[Any, str]:
    """Handles of a little memory and an event for the other ranks to open, and why there are none (an empty string if there are).

    The layer keeps both until its next probe, by when all ranks have opened these.
    """
    if layer is None:
        return None, "the taps are on the CPU"
    try:
        layer.probe = memory, event = layer.allocate(64), layer.new_event(is_shared=True)
        return (layer.export_memory(memory), layer.export_event(event)), ""
    except (RuntimeError, OSError) as error:
        return None, f"this device's memory can't be shared (expandable segments?): {error}"


def open_probe(layer: DeviceLayer | None, handle: Any) -> str:
    """Why another rank's handle can't be opened here, or an empty string."""
    if layer is None or handle is None:
        return "a rank has no device memory to share"
    try:
        layer.open_memory(handle[0])
        layer.open_event(handle[1])
    except (RuntimeError, OSError) as error:
        return f"another device's memory can't be opened: {error}"
    return ""
