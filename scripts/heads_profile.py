"""From what heads chose to which of them are unstable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.profiling import Profile, head_stability
from models import Loaded
from scripts.page_traces import Trace


def profile_of(
  loaded: Loaded, traces: Sequence[Trace], pages: int, fraction: float, period: int
) -> Profile:
  """The unstable heads of all traces together.

  Args:
    loaded: the model.
    traces: of texts that are longer than the budget.
    pages: K.
    fraction: of all heads that are unstable, rounded to the nearest number.
    period: steps of a window.
  """
  config = loaded.model.config
  shape, heads = (config.num_layers, config.num_kv_heads), config.num_layers * config.num_kv_heads
  count = round(fraction * heads)
  scores = {
    place: head_stability.instability(one.chosen[pages], one.pages, period).reshape(-1, heads)
    for place, one in enumerate(traces)
  }
  every = np.concatenate(list(scores.values()))
  unstable = head_stability.unstable_heads(every, count)
  sets = head_stability.most_unstable(every, count)
  settings = {
    "pages": pages,
    "page_size": traces[0].about["page_size"],
    "shape": list(shape),
    "period": period,
    "fraction": fraction,
    "windows": len(every),
    "data": [
      {name: value for name, value in one.about.items() if name != "content_hash"} for one in traces
    ],
    "consistency": _consistency(traces, scores, sets, count, heads),
  }
  arrays = {
    "unstable_heads": np.stack(np.unravel_index(unstable, shape), axis=1).astype(np.int32),
    "instability": np.round(every.mean(axis=0), 4).reshape(shape),
    "windows_among_the_most_unstable": np.bincount(sets.ravel(), minlength=heads).reshape(shape),
  }
  return Profile(head_stability.METHOD, loaded.name, loaded.content_hash, settings, arrays)


def sets_by_text(
  traces: Sequence[Trace], scores: dict[int, np.ndarray], count: int
) -> dict[str, set[int]]:
  """The unstable heads of each text alone; scores by place of the trace."""
  names = dict.fromkeys(one.name for one in traces)
  return {
    name: set(
      head_stability.unstable_heads(
        np.concatenate([scores[place] for place, one in enumerate(traces) if one.name == name]),
        count,
      ).tolist()
    )
    for name in names
  }


def _consistency(traces, scores, sets, count, heads) -> dict[str, Any]:
  """Of all windows, of texts, and of windows that were not seen; None where there is one only."""
  if not 0 < count < heads:
    return {}
  of_texts = list(sets_by_text(traces, scores, count).values())

  def rounded(between) -> dict[str, float] | None:
    if len(between) < 2:
      return None
    found = head_stability.consistency(between, heads)._asdict()
    return {name: value and round(value, 4) for name, value in found.items()}

  recall = head_stability.held_out_recall(sets, heads) if len(sets) > 1 else None
  return {
    "windows": rounded(sets.tolist()),
    "texts": rounded(of_texts),
    "held_out_recall": recall and round(recall, 4),
  }


def mean_by_distance(traces: Sequence[Trace], pages: int, distances: Sequence[int]) -> np.ndarray:
  """f64[D, L, K], the mean over traces of `head_stability.by_distance`."""
  found = [head_stability.by_distance(one.chosen[pages], one.pages, distances) for one in traces]
  return np.mean(found, axis=0)


def telling_layer(scores: np.ndarray, unstable: Sequence[Sequence[int]]) -> int:
  """Of the layers with heads of both kinds the one whose f64[L, K] scores differ most; of all
  layers where there is none."""
  count = np.bincount([layer for layer, _ in unstable], minlength=len(scores))
  both = (count > 0) & (count < scores.shape[1])
  return int(np.where(both, 1 + np.ptp(scores, axis=1), np.ptp(scores, axis=1)).argmax())
