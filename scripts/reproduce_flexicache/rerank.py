"""Ranking less often: Figures 7 and 8, and the sweep and the controls that the paper lacks.

The paper times its kernels on a GPU; here what they have less to do is counted: rankings of a head
and of a layer in a step, and pages that attention reads. Beside that what it costs, attention on
pages that are left out, and what it moves. Rules, by the field `rule`:

  fixed      the paper's, for fractions of unstable heads from 0 to 1 and periods from 1 to 64
  profile    at the asked fraction and period, with profiles of these texts, of each other text, of
             another model stretched to this shape, and random ones
  adaptive   each head's own period, by what page scores promise (`flexicache_adaptive`); by the
             attention itself, which only a trace knows; and by the number of shared pages alone
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eval.results import Row
from kvjax.profiling import load_heads
from scripts.page_traces import Trace
from scripts.reproduce_flexicache import replay
from scripts.reproduce_flexicache.case import Case, row_of, unstable_mask
from scripts.reproduce_flexicache.replay import Counts
from scripts.reproduce_opkv.drawing import Panel, draw
from scripts.reproducing import Comparison, Item

FRACTIONS, PERIODS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0), (1, 2, 4, 8, 16, 32, 64)
BOUNDS, PAGE_BOUNDS = (0.003, 0.01, 0.03, 0.1), (0.1, 0.2, 0.4)
DEFAULT_BOUND = 0.01
DRAWS = 20  # random profiles
OWN, OTHER_TEXT, OTHER_SHAPE, RANDOM = "these texts", "another text", "another model", "random"
_Masks = Sequence[Sequence[np.ndarray]]  # bool[L, K] of unstable heads, one or more for each trace
PROFILES = Path(__file__).resolve().parents[2] / "profiles"
KEPT = (("small-llama-heads-8", 8), ("smollm2-135m-heads-64", 64))  # profiles, and their K
COLUMNS = (
  *("budget_tokens", "rule", "by", "fraction", "period", "missed_mass", "missed_ratio"),
  *("stale_loss_ratio", "agreement_ratio", "promoted_ratio", "rankings_per_step"),
  *("layers_ranked_ratio", "device_pages_ratio", "read_pages_ratio"),
)


def run(case: Case) -> list[Row]:
  """Rows of every rule for each budget, the mean over texts.

  Raises:
    ValueError: a trace of an earlier version, which does not say what page scores promise.
  """
  if any(trace.promised is None for trace in case.traces):
    raise ValueError(
      "a trace does not say what page scores promise, as it is of an earlier version; delete it "
      "and make it again with scripts.profile_heads"
    )
  return [row for pages in case.budgets for row in _of_budget(case, pages)]


def _of_budget(case: Case, pages: int) -> list[Row]:
  periods = sorted({*PERIODS, case.period})
  by_period = {
    period: [replay.count(one, pages, replay.fixed(one, pages, period)) for one in case.traces]
    for period in periods
  }
  always, shape = by_period[1], (case.config.num_layers, case.config.num_kv_heads)

  def row(rule: str, by: str, found: Sequence[Counts], masks: _Masks, **more) -> Row:
    runs = [
      _mixed(trace, pages, every_step, counts, mask)
      for trace, every_step, counts, of_trace in zip(case.traces, always, found, masks, strict=True)
      for mask in of_trace
    ]
    means = {name: float(np.mean([one[name] for one in runs])) for name in runs[0]}
    none = dict.fromkeys(("fraction", "period", "missed_mass"))
    return row_of(case, "rerank", pages, rule=rule, by=by, **none | more | means)

  rows = []
  for fraction in sorted({*FRACTIONS, case.fraction}):
    mask = unstable_mask(case._replace(fraction=fraction), pages)
    rows += [
      row("fixed", OWN, by_period[period], _for_all(case, mask), fraction=fraction, period=period)
      for period in periods
    ]
  for by, masks in _profiles(case, pages).items():
    asked = {"fraction": case.fraction, "period": case.period}
    rows.append(row("profile", by, by_period[case.period], masks, **asked))
  nobody = _for_all(case, np.zeros(shape, bool))
  for by, bounds in (("promised", BOUNDS), ("attention", BOUNDS), ("pages", PAGE_BOUNDS)):
    for bound in bounds:
      found = [_adaptive(one, pages, by, bound) for one in case.traces]
      rows.append(row("adaptive", by, found, nobody, missed_mass=bound))
  return rows


def _adaptive(trace: Trace, pages: int, by: str, bound: float) -> Counts:
  if by == "pages":
    missing = replay.of_pages(trace)
  else:
    shares = trace.promised if by == "promised" else trace.mass
    assert shares is not None
    missing = replay.of_shares(shares)
  return replay.count(trace, pages, replay.adaptive(trace, pages, missing, bound))


def _for_all(case: Case, *masks: np.ndarray) -> _Masks:
  return [masks] * len(case.traces)


def _mixed(
  trace: Trace, pages: int, always: Counts, counts: Counts, unstable: np.ndarray
) -> dict[str, float]:
  """Heads that are unstable by a mask bool[L, K] are ranked always and move nothing."""
  there = trace.pages[-1]
  missed = np.where(unstable, always.missed, counts.missed)
  ranked = counts.ranked | unstable
  device = np.where(unstable, there, min(pages + 1, there))
  return {
    "missed_ratio": missed.mean(),
    "stale_loss_ratio": (missed - always.missed).mean(),
    "agreement_ratio": np.where(unstable, always.agreement, counts.agreement).mean(),
    "promoted_ratio": np.where(unstable, 0, counts.promoted).mean(),
    "rankings_per_step": ranked.mean(),
    "layers_ranked_ratio": ranked.any(axis=2).mean(),
    "device_pages_ratio": device.mean() / there,
    "read_pages_ratio": min(pages, there) / there,
  }


def _profiles(case: Case, pages: int) -> dict[str, _Masks]:
  """Masks by whose profile they are of."""
  own = unstable_mask(case, pages)
  found = {OWN: _for_all(case, own)}
  if len(case.texts) > 1:
    of_text = {text: unstable_mask(case, pages, text) for text in case.texts}
    found[OTHER_TEXT] = [
      [mask for text, mask in of_text.items() if text != trace.name] for trace in case.traces
    ]
  found[OTHER_SHAPE] = _for_all(case, of_another_model(case))
  rng = np.random.default_rng(0)
  random = [rng.permuted(own.ravel()).reshape(own.shape) for _ in range(DRAWS)]
  return found | {RANDOM: _for_all(case, *random)}


def of_another_model(case: Case) -> np.ndarray:
  """bool[L, K]: the most unstable heads of a kept profile of another shape, each of whose layers
  and heads stands for those of this shape at the same part of the way."""
  shape = case.config.num_layers, case.config.num_kv_heads
  kept = (load_heads(PROFILES / f"{name}.json", pages, 16) for name, pages in KEPT)
  every = (profile.arrays["instability"] for profile in kept)
  scores = next(scores for scores in every if scores.shape != shape)
  places = [np.arange(n) * m // n for n, m in zip(shape, scores.shape, strict=True)]
  order = np.argsort(-scores[np.ix_(*places)].ravel(), kind="stable")
  mask = np.zeros(case.num_heads, bool)
  mask[order[: case.num_unstable]] = True
  return mask.reshape(shape)


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
  """Attention missed, and pages moved, by rankings; of the first budget."""
  rows = [row for row in rows if row["budget_tokens"] == rows[0]["budget_tokens"]]
  panels = []
  for name, label in (
    ("stale_loss_ratio", "attention missed beside ranking always"),
    ("promoted_ratio", "share of K pages moved in a step"),
  ):
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
      if row["rule"] != "profile":
        of = row["by"] if row["fraction"] is None else f"{row['fraction']:.3g} unstable"
        xs, ys = lines.setdefault(f"{row['rule']}, {of}", ([], []))
        xs.append(row["rankings_per_step"])
        ys.append(row[name])
    panels.append(Panel("rankings of a head in a step", label, lines))
  draw(panels, title, path)


def compare(rows: Sequence[Row]) -> list[Comparison]:
  """What is spared by the asked rule, what the adaptive one does instead, and wrong profiles."""
  budgets = list(dict.fromkeys(row["budget_tokens"] for row in rows))
  asked = [_one(rows, budget, "profile", OWN) for budget in budgets]
  own = [_one(rows, budget, "adaptive", "promised", DEFAULT_BOUND) for budget in budgets]
  profiles = [row for row in rows if row["rule"] == "profile"]
  rule = f"{asked[0]['fraction']:.0%} unstable, period {asked[0]['period']}"
  return [
    Comparison(
      "Figs 7-8",
      "what attention over selected pages spares",
      "kernel 4x as fast (batch 40, prompts of 10k tokens, H100)",
      "; ".join(f"{1 / row['read_pages_ratio']:.1f}x fewer pages{_at(row)}" for row in asked),
      "pages counted, no kernel timed; other lengths and another model",
    ),
    Comparison(
      "Figs 7-8",
      f"what ranking by stability spares beside ranking every head always ({rule})",
      "ranking 2.44x as fast (the same)",
      "; ".join(
        f"{1 / row['rankings_per_step']:.2f}x fewer rankings of a head, "
        f"{1 / row['layers_ranked_ratio']:.2f}x fewer of a layer{_at(row)}"
        for row in asked
      ),
      "rankings counted, not timed",
    ),
    Comparison(
      "-",
      f"periods that follow each head (bound {DEFAULT_BOUND:.0%}) beside {rule}",
      "not in the paper",
      "; ".join(f"{_costs(a)} beside {_costs(b)}{_at(a)}" for a, b in zip(own, asked, strict=True)),
      "beside the paper; the adaptive rule knows no profile and keeps no head on the device whole",
    ),
    Comparison(
      "-",
      f"attention lost beside ranking always, by whose profile it is ({rule})",
      "not in the paper",
      "; ".join(f"{row['by']} {row['stale_loss_ratio']:.4f}{_at(row)}" for row in profiles),
      "beside the paper; these texts' own profile is of the very steps that are counted",
    ),
  ]


def _one(rows, budget: int, rule: str, by: str, bound: float | None = None) -> Row:
  wanted = budget, rule, by, bound
  names = "budget_tokens", "rule", "by", "missed_mass"
  return next(row for row in rows if tuple(row[name] for name in names) == wanted)


def _at(row: Row) -> str:
  return f" at {row['budget_tokens']:,} tokens"


def _costs(row: Row) -> str:
  return (
    f"{row['stale_loss_ratio']:.4f} lost, {row['agreement_ratio']:.2f} of a fresh list used, "
    f"{row['promoted_ratio']:.3f} of K moved and "
    f"{row['rankings_per_step']:.2f} rankings a step, {row['device_pages_ratio']:.2f} of the pages "
    "on the device"
  )


ITEM = Item(run, plot, compare, COLUMNS)
