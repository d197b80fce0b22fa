"""Several processes that share the examples of a run, by `jax.distributed`.

Each computes alone, on its own first device, and they must see the same folder of the run; all that
they tell each other is when they have come to the same point.
"""

from __future__ import annotations

import re

import jax
from absl import flags

flags.disclaim_key_flags()
_PATIENCE_S = 7 * 24 * 60 * 60  # one process may have much more to do than another


def define_flags() -> None:
  """--coordinator_address, --num_processes and --process_id."""
  flags.DEFINE_integer("num_processes", 1, "Processes that share the run.", lower_bound=1)
  flags.DEFINE_integer("process_id", 0, "Which of them this is, from 0.")
  flags.DEFINE_string(
    "coordinator_address", None, "HOST:PORT at which process 0 listens, the same for all."
  )


def join(args: flags.FlagValues) -> None:
  """Meets the other processes, if there are any; nothing may have been computed before.

  Raises:
    ValueError: flags that do not fit each other.
  """
  count, process, address = args.num_processes, args.process_id, args.coordinator_address
  if not 0 <= process < count:
    raise ValueError(f"--process_id={process} is not one of 0 to {count - 1} (--num_processes)")
  if count == 1:
    return
  if not re.fullmatch(r"[^\s:]+:\d{1,5}", address or ""):
    raise ValueError(f"--coordinator_address={address}: expected HOST:PORT, where process 0 runs")
  if args["out_dir"].using_default_value:
    raise ValueError("--num_processes: several processes need the same --out_dir; give it")
  # Process 0 listens where it was told and nowhere else.
  bind = address if process == 0 else None
  jax.distributed.initialize(address, count, process, coordinator_bind_address=bind)


def wait(name: str, args: flags.FlagValues) -> None:
  """Returns when all processes have called it with this name, which each may do once."""
  if args.num_processes > 1:
    from orbax.checkpoint import multihost  # takes seconds to import

    everyone = set(range(args.num_processes))
    multihost.sync_global_processes(name, timeout=_PATIENCE_S, processes=everyone)
