"""Copy tensors to a GPU on a stream of their own, so that the copies run beside the computation.

loader's thread    read, pin, start copies
copy stream                  [ copies of step 2 ]          [ copies of step 3 ]
compute stream     [ kernels of step 1 ........ ][wait][ kernels of step 2 ..... ]
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class DeviceCopies:
    """Copies from the host to one device; the identity where the device is the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def start(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor [...] of the host, which must not be used before `finish`. From any thread."""
        if self._stream is None:
            return tensor.to(self._device)
        with torch.cuda.stream(self._stream):
            # Nothing needs to hold the pinned memory: its allocator records an event behind the copy, and reuses the
            # memory only after that event.
            return tensor.pin_memory().to(self._device, non_blocking=True)

    def finish(self, copies: Iterable[Tensor]) -> None:
        """Let the current stream wait for copies that `start` returned; the host does not wait."""
        if self._stream is None:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._stream.record_event())
        for copy in copies:
            # its memory belongs to the copy stream, which would reuse it while kernels of this stream still read it
            copy.record_stream(stream)
