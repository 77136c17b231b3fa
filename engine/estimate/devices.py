"""What GPUs can do at most, as their makers say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One GPU of a usual machine.

    Attributes:
        flops: bf16 products a second, dense, fp32 sums.
        memory_bandwidth: bytes a second.
        node_bandwidth: bytes a second to GPUs of its node, one way.
        network_bandwidth: bytes a second to other nodes, one way: its share of the node's cards.
    """

    flops: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float


DEVICES = {
    # NVIDIA A100 data sheet (June 2021): 312 TFLOP/s, 1555 and 2039 GB/s, NVLink 600 GB/s both
    # ways. DGX A100 data sheet: 8 cards of 200 Gb/s.
    "a100-40": Device(312e12, 1.555e12, 300e9, 25e9),
    "a100": Device(312e12, 2.039e12, 300e9, 25e9),
    # NVIDIA H100 data sheet, SXM: 1979 TFLOP/s with sparsity, half of it dense, 3.35 TB/s,
    # NVLink 900 GB/s both ways. DGX H100 data sheet: 8 cards of 400 Gb/s.
    "h100": Device(989e12, 3.35e12, 450e9, 50e9),
    # NVIDIA H200 data sheet, SXM: as H100, 4.8 TB/s. DGX H200 data sheet: 8 cards of 400 Gb/s.
    "h200": Device(989e12, 4.8e12, 450e9, 50e9),
    # NVIDIA DGX B200 data sheet, of 8: 36 PFLOP/s with sparsity, 64 TB/s, NVLink 14.4 TB/s both
    # ways, 8 cards of 400 Gb/s.
    "b200": Device(2250e12, 8e12, 900e9, 50e9),
    # NVIDIA L40S data sheet: 362 TFLOP/s, 864 GB/s, PCIe 4.0 x16, 64 GB/s both ways. Its machines
    # differ; taken here: a card of 100 Gb/s for each GPU.
    "l40s": Device(362e12, 0.864e12, 32e9, 12.5e9),
    # NVIDIA Ada GPU architecture white paper, appendix A: 165.2 TFLOP/s, 1008 GB/s, PCIe 4.0 x16.
    # Network: as above.
    "rtx4090": Device(165.2e12, 1.008e12, 32e9, 12.5e9),
}
