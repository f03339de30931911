"""The section `weights`: how the policy's weights travel, and what cannot carry them."""

from __future__ import annotations

from llamarl.words.choices import Transport
from llamarl.words.fields import settings_dataclass
from llamarl.words.findings import Findings


@settings_dataclass
class WeightsSettings:
    transport: Transport
    """How weights travel. shm, cuda_ipc: between ranks of one host; gloo, nccl: over a network;
    auto: the best that connects the ranks.
    """


def find_weights(
    weights: WeightsSettings, found: Findings, *, cpu_offload: bool, num_hosts: int
) -> None:
    """Find transports that cannot connect the ranks. cpu_offload: the trainer's."""
    transport = weights.transport
    if transport in ("nccl", "cuda_ipc") and cpu_offload:
        found.add(
            "with cpu_offload weights leave from host memory, which only shm and gloo can read; "
            "weights.transport=auto",
            "weights.transport",
            "trainer.cpu_offload",
        )
    if transport in ("shm", "cuda_ipc") and num_hosts > 1:
        found.add(
            f"ranks on {num_hosts} hosts share no memory; weights.transport=gloo or nccl, or auto",
            "weights.transport",
        )
