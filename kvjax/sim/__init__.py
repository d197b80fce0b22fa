"""Seconds that were not measured: machines as numbers, and what a model costs on them.

Whatever comes from here is simulated, and a row of results that holds it says so.
"""

from kvjax.sim.costs import decode_step_s, digest_bytes, kv_bytes, prefill_s, transfer_s
from kvjax.sim.hardware import MACHINES, Machine, machine

__all__ = [
  "MACHINES",
  "Machine",
  "decode_step_s",
  "digest_bytes",
  "kv_bytes",
  "machine",
  "prefill_s",
  "transfer_s",
]
