"""What the transports between GPUs need of a device, small enough that tests can play it on the CPU.

[`CudaLayer`] was not run on a GPU: it follows the documentation of torch and CUDA.
"""

import os
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

# What one ring over NCCL occupies: its own stream and the one that torch gives its communicator.
_STREAMS_PER_RING = 2
# The model's, and NCCL's for the pipeline, context parallelism and gradients: as many as this package knows of.
_OTHER_STREAMS = 4
_DEFAULT_QUEUES, _MAX_QUEUES = 8, 32  # CUDA's
# A send holds its multiprocessors until its receive runs. Few each, or the sends of many rings leave no room for receives.
_MAX_CTAS = 2


class DeviceLayer(Protocol):
    """Memory, streams and events of this rank's device. A handle is what another process opens; it can be pickled.

    A handle is good while this process keeps what it stands for; so is what others have opened by it. A `stream` is
    `"current"`, where the model computes, or what [`new_stream`] returned.
    """

    device: torch.device
    probe: Any
    """What [`export_probe`] showed to the other ranks last."""

    def allocate(self, num_bytes: int) -> torch.Tensor: ...
    def export_memory(self, memory: torch.Tensor) -> Any: ...
    def open_memory(self, handle: Any) -> torch.Tensor: ...

    def new_stream(self) -> Any: ...
    def queue_problem(self, num_rings: int) -> str:
        """Why the streams of so many rings over NCCL might wait for each other without an event, or an empty string."""

    def new_event(self, *, is_shared: bool = False) -> Any: ...
    def export_event(self, event: Any) -> Any: ...
    def open_event(self, handle: Any) -> Any: ...
    def record(self, event: Any, *, stream: Any) -> None: ...
    def wait(self, event: Any, *, stream: Any) -> None:
        """Lets the stream, not the host, wait for the latest record of the event; at once if there is none."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, stream: Any) -> None:
        """Copies on a stream, which keeps `source` from being freed before."""

    def connect_pair(self, store: dist.Store, pair_rank: int, *, watchdog_s: float) -> Any:
        """A communicator between two ranks, of which this one is 0 or 1; only they call this.

        The first transfer sets it up, for which the host waits for the other rank without a limit. A transfer that takes
        longer than `watchdog_s` seconds may end the process.
        """

    def send(self, tensor: torch.Tensor, *, pair: Any, to_rank: int, stream: Any) -> None:
        """Sends on a stream, which keeps `tensor` from being freed before and goes on once the receive has run."""

    def receive(self, tensor: torch.Tensor, *, pair: Any, from_rank: int, stream: Any) -> None: ...
    def finish(self, stream: Any, *, timeout_s: float) -> bool:
        """Lets the host wait for a stream; whether it was done in time."""

    def disconnect(self, pair: Any) -> None: ...


class CudaLayer:
    """A [`DeviceLayer`] of a CUDA device. Not run on a GPU.

    Args:
        device (`torch.device`): of this rank's stages.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.probe: Any = None

    def _stream(self, stream: Any) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if stream == "current" else stream

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def export_memory(self, memory: torch.Tensor) -> Any:
        return reduce_tensor(memory)[1]

    def open_memory(self, handle: Any) -> torch.Tensor:
        return rebuild_cuda_tensor(*handle)

    def new_stream(self) -> Any:
        # torch hands out 32 streams of a priority in turn; of high priority few others ask for one.
        return torch.cuda.Stream(self.device, priority=-1)

    def queue_problem(self, num_rings: int) -> str:
        # Streams beyond CUDA's queues share one, in which a stream that waits holds up what others have behind it.
        asked = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
        num_queues = min(int(asked) if asked.isdigit() else _DEFAULT_QUEUES, _MAX_QUEUES)
        needed = _STREAMS_PER_RING * num_rings + _OTHER_STREAMS
        if needed <= num_queues:
            return ""
        remedy = (
            f"set it to {needed} or more (at most {_MAX_QUEUES}) before CUDA starts"
            if needed <= _MAX_QUEUES
            else f"{_MAX_QUEUES} is the most that CUDA has: use fewer taps or sinks"
        )
        return (
            f"{num_rings} ring(s) over NCCL need {needed} hardware queues, for {_STREAMS_PER_RING} streams each and "
            f"{_OTHER_STREAMS} others, and CUDA_DEVICE_MAX_CONNECTIONS ({asked or 'not set'}) gives {num_queues}; {remedy}"
        )

    def new_event(self, *, is_shared: bool = False) -> Any:
        return torch.cuda.Event(interprocess=is_shared)

    def export_event(self, event: Any) -> Any:
        return event.ipc_handle()

    def open_event(self, handle: Any) -> Any:
        return torch.cuda.Event.from_ipc_handle(self.device, handle)

    def record(self, event: Any, *, stream: Any) -> None:
        event.record(self._stream(stream))

    def wait(self, event: Any, *, stream: Any) -> None:
        event.wait(self._stream(stream))

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, stream: Any) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(stream)

    def connect_pair(self, store: dist.Store, pair_rank: int, *, watchdog_s: float) -> Any:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # as in `new_stream`
        options.config.max_ctas = _MAX_CTAS
        options._timeout = timedelta(seconds=watchdog_s)
        return dist.ProcessGroupNCCL(store, pair_rank, 2, options)

    def send(self, tensor: torch.Tensor, *, pair: Any, to_rank: int, stream: Any) -> None:
        with torch.cuda.stream(stream):
            pair.send([tensor], to_rank, 0).wait()  # orders the stream behind NCCL's; the host goes on
        tensor.record_stream(stream)

    def receive(self, tensor: torch.Tensor, *, pair: Any, from_rank: int, stream: Any) -> None:
        with torch.cuda.stream(stream):
            pair.recv([tensor], from_rank, 0).wait()

    def finish(self, stream: Any, *, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while not stream.query():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(1e-3)
        return True

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
