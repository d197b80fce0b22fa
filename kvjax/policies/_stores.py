"""Which stores a policy can run on."""

from __future__ import annotations


def recalling(group: str = "max") -> tuple[str, ...]:
  """Stores that lose nothing, for policies that select anew at every step and, once a prompt is
  read, look at no key of a selecting layer again: with most of these the keys are on the host.

  Args:
    group: how query heads agree; "none", a list for each, is not for stores of single tokens, which
      are those of a KV head.
  """
  by_page = ("resident", "whole_page", "prefetch_all")
  return by_page if group == "none" else (*by_page, "op_block", "token_slots")


def recalling_pages(group: str = "max") -> tuple[str, ...]:
  """Those of a policy that selects whole pages: also the store that has slots of a page.

  Single tokens may lie in as many pages as there are tokens, which would be nearly all.

  Args:
    group: see `recalling`.
  """
  return recalling(group) if group == "none" else (*recalling(group), "head_tiered")
