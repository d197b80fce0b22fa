"""`STORES` names every store; `kvjax.opkv` has one too, above those of `kvjax.stores`."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from kvjax.opkv.op_block import op_block
from kvjax.opkv.token_slots import token_slots
from kvjax.policies import split_spec, values_of
from kvjax.stores.compact import COMPACT
from kvjax.stores.head_tiered import HEAD_TIERED
from kvjax.stores.resident import RESIDENT
from kvjax.stores.whole_page import PREFETCH_ALL, WHOLE_PAGE
from kvjax.types import Store

STORES: dict[str, Callable[..., Store]] = {
  "resident": lambda: RESIDENT,
  "compact": lambda: COMPACT,
  "whole_page": lambda: WHOLE_PAGE,
  "prefetch_all": lambda: PREFETCH_ALL,
  "head_tiered": lambda: HEAD_TIERED,
  "op_block": op_block,
  "token_slots": token_slots,
}


def make_store(spec: str) -> Store:
  """The store of this name with the options behind it: "op_block:rho=0.5:strict=True".

  Options become part of the store's name, by which results are told apart.

  Raises:
    ValueError: no such store, no such option, or an option outside its range.
  """
  name, texts = split_spec(spec, "store")
  if name not in STORES:
    raise ValueError(f"unknown store {name!r}; expected one of {', '.join(STORES)}")
  known = inspect.signature(STORES[name]).parameters
  unknown = sorted({*texts} - {*known})
  if unknown:
    raise ValueError(
      f"store {name!r} has no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}"
    )
  try:
    store = STORES[name](**values_of(spec, texts, STORES[name], "store"))
  except ValueError as error:
    message = str(error)
    raise ValueError(
      message if message.startswith("store") else f"store {spec!r}: {message}"
    ) from None
  return store._replace(name=spec)
