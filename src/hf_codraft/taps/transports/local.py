"""The owner of the tap is its sink: a reference. Also the two ends of `relay` inside a process."""

from collections import deque

import torch

from hf_codraft.taps.protocol import Header, RingPlan, TapProtocolError


class LocalRing:
    """A hand-over inside one process. No slots: whoever would have to wait for the sink would wait for itself."""

    def __init__(self, plan: RingPlan):
        self.plan = plan
        self.messages: deque[tuple[Header, torch.Tensor]] = deque()

    def write(self, header: Header, payload: torch.Tensor) -> None:
        self.messages.append((header, payload))

    def read(self, sequence: int) -> tuple[Header, torch.Tensor]:
        if not self.messages:
            raise TapProtocolError(
                "nothing was handed over, and this rank is the one to do it (publish, or deliver what was relayed)"
            )
        return self.messages.popleft()

    def release(self) -> None:
        pass

    def progress(self) -> str:
        return f"{len(self.messages)} handed over and not taken"
