"""Where KV lives and how it comes back; `STORES` names every store."""

from kvjax.stores.compact import COMPACT
from kvjax.stores.resident import RESIDENT
from kvjax.types import Store

STORES: dict[str, Store] = {store.name: store for store in (RESIDENT, COMPACT)}


def make_store(name: str) -> Store:
  """The store of this name.

  Raises:
    ValueError: there is none.
  """
  if name not in STORES:
    raise ValueError(f"unknown store {name!r}; expected one of {', '.join(STORES)}")
  return STORES[name]


__all__ = ["STORES", "make_store"]
