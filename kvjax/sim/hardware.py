"""Machines: how fast they compute and move bytes, and where the numbers come from.

GPUs are the peaks of their data sheets times the share of a peak that well-written code reaches
(`_PRODUCTS`, `_MEMORY`, `_LINK`): an assumption of ours, the same for all of them, so that ratios
between methods on one machine depend little on it. A CPU is what `scripts.calibrate` measured.
"""

from __future__ import annotations

from typing import NamedTuple

_PRODUCTS, _MEMORY, _LINK = 0.6, 0.8, 0.8
_GPU_STEP_S = 20e-6  # to start what a layer runs, as CUDA graphs leave it


class Machine(NamedTuple):
  """Rates that are reached, not peaks; bytes and seconds.

  Attributes:
    name: what it is.
    source: where the numbers come from.
    product_flops_per_s: products of large matrices.
    attention_flops_per_s: attention of many queries, softmax included.
    read_bytes_per_s: device memory, read by the product of a matrix and one row.
    few_rows_bytes_per_s: the same with a few rows: a batch, or the query heads of a KV head.
    link_bytes_per_s: between device and host memory, each way.
    host_bytes_per_s: host memory.
    disk_bytes_per_s: SSD.
    device_bytes: memory of the device.
    host_bytes: memory of the host.
    item_bytes: of a weight, key or value as it computes with them: 2 for bf16, 4 for f32.
    layer_s: of every layer of a step, whatever it computes.
    transfer_s: to begin a transfer.
  """

  name: str
  source: str
  product_flops_per_s: float
  attention_flops_per_s: float
  read_bytes_per_s: float
  few_rows_bytes_per_s: float
  link_bytes_per_s: float
  host_bytes_per_s: float
  disk_bytes_per_s: float
  device_bytes: float
  host_bytes: float
  item_bytes: int
  layer_s: float
  transfer_s: float


def _gpu(
  name: str,
  source: str,
  *,
  bf16_flops_per_s: float,
  device_bytes_per_s: float,
  device_bytes: float,
  link_bytes_per_s: float,
  host_bytes_per_s: float = 200e9,
  host_bytes: float = 256e9,
  disk_bytes_per_s: float = 1.5e9,
) -> Machine:
  """From the peaks of a data sheet; bf16 dense, link each way."""
  memory = _MEMORY * device_bytes_per_s
  return Machine(
    name=name,
    source=source,
    product_flops_per_s=_PRODUCTS * bf16_flops_per_s,
    attention_flops_per_s=_PRODUCTS * bf16_flops_per_s,
    read_bytes_per_s=memory,
    few_rows_bytes_per_s=memory,
    link_bytes_per_s=_LINK * link_bytes_per_s,
    host_bytes_per_s=host_bytes_per_s,
    disk_bytes_per_s=disk_bytes_per_s,
    device_bytes=device_bytes,
    host_bytes=host_bytes,
    item_bytes=2,
    layer_s=_GPU_STEP_S,
    transfer_s=10e-6,
  )


MACHINES: dict[str, Machine] = {
  "h100-sxm": _gpu(
    "NVIDIA H100 SXM5 80 GB",
    "NVIDIA H100 data sheet: bf16 989 TFLOP/s dense, 3.35 TB/s, PCIe 5.0 x16",
    bf16_flops_per_s=989e12,
    device_bytes_per_s=3.35e12,
    device_bytes=80e9,
    link_bytes_per_s=64e9,
  ),
  "h100-nvl": _gpu(
    "NVIDIA H100 NVL 94 GB, the test bed of FlexiCache",
    "NVIDIA H100 NVL data sheet: bf16 835 TFLOP/s dense, 3.9 TB/s, PCIe 5.0 x16; 180 GB of host "
    "memory for keys and values as in the paper",
    bf16_flops_per_s=835e12,
    device_bytes_per_s=3.9e12,
    device_bytes=94e9,
    link_bytes_per_s=64e9,
    host_bytes=180e9,
  ),
  "h100-pcie": _gpu(
    "NVIDIA H100 PCIe 80 GB",
    "NVIDIA H100 data sheet: bf16 756 TFLOP/s dense, 2.0 TB/s, PCIe 5.0 x16",
    bf16_flops_per_s=756e12,
    device_bytes_per_s=2.0e12,
    device_bytes=80e9,
    link_bytes_per_s=64e9,
  ),
  "a800": _gpu(
    "NVIDIA A800 SXM4 80 GB",
    "NVIDIA A800 data sheet: bf16 312 TFLOP/s dense, 2.04 TB/s, PCIe 4.0 x16; host and disk of "
    "Bidaw's test bed: 200 GB for histories, SATA SSDs at 1.5 GB/s",
    bf16_flops_per_s=312e12,
    device_bytes_per_s=2.039e12,
    device_bytes=80e9,
    link_bytes_per_s=32e9,
    host_bytes=200e9,
  ),
  "l40": _gpu(
    "NVIDIA L40 48 GB, the test bed of OPKV",
    "NVIDIA L40 data sheet: bf16 181 TFLOP/s dense, 864 GB/s, PCIe 4.0 x16; 256 GB of host memory "
    "as in the paper",
    bf16_flops_per_s=181e12,
    device_bytes_per_s=864e9,
    device_bytes=48e9,
    link_bytes_per_s=32e9,
    host_bytes=256e9,
  ),
  "cpu-2-cores": Machine(
    name="2 cores of an AMD EPYC with AVX-512, f32",
    source="scripts.calibrate, 2026-11-30, jax 0.12.0.1, nothing beside; the disk is assumed",
    product_flops_per_s=1.875e11,
    attention_flops_per_s=5.71e10,
    read_bytes_per_s=1.871e10,
    few_rows_bytes_per_s=1.667e10,
    link_bytes_per_s=1.358e10,
    host_bytes_per_s=1.358e10,
    disk_bytes_per_s=1.5e9,
    device_bytes=24e9,
    host_bytes=24e9,
    item_bytes=4,
    layer_s=1e-4,
    transfer_s=1e-6,
  ),
}


def machine(name: str) -> Machine:
  """The machine of this name.

  Raises:
    ValueError: there is none.
  """
  if name not in MACHINES:
    raise ValueError(f"unknown machine {name!r}; expected one of {', '.join(MACHINES)}")
  return MACHINES[name]
