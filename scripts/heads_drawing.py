"""Pictures of a profile of heads: how unstable each is, and how long its pages stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.plots import save


def heat_map(scores: np.ndarray, unstable: Sequence[Sequence[int]], title: str, path: Path) -> None:
  """One cell a KV head, layers to the right; a dot on the unstable ones.

  Args:
    scores: f64[L, K], instability.
    unstable: pairs (layer, KV head).
    title: what of which model.
    path: of the PNG.
  """
  layers, heads = scores.shape
  figure = Figure(figsize=(2.6 + 0.26 * layers, 1.7 + 0.3 * heads), layout="constrained")
  axes = figure.subplots()
  image = axes.imshow(scores.T, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower")
  if len(unstable):
    xs, ys = np.transpose(unstable)
    axes.scatter(xs, ys, s=16, color="white", edgecolors="black", linewidths=0.6)
  axes.set_xlabel("layer (dots: the unstable heads)")
  axes.set_ylabel("KV head")
  for axis in (axes.xaxis, axes.yaxis):
    axis.set_major_locator(MaxNLocator(integer=True))
  figure.colorbar(image, ax=axes, label="instability")
  _entitled(figure, title)
  save(figure, path)


def by_distance(
  distances: Sequence[int],
  overlap: np.ndarray,
  unstable: Sequence[Sequence[int]],
  layer: int,
  title: str,
  path: Path,
) -> None:
  """Overlap beyond chance by the steps between two lists: the heads of a layer, and all heads.

  Args:
    distances: steps, D of them.
    overlap: f64[D, L, K].
    unstable: pairs (layer, KV head).
    layer: whose heads the first panel has.
    title: what of which model.
    path: of the PNG.
  """
  pairs = {(int(of), int(head)) for of, head in unstable}
  _, layers, heads = overlap.shape
  figure = Figure(figsize=(9.6, 4.2), layout="constrained")
  one, every = figure.subplots(1, 2, sharey=True)
  for head in range(heads):
    style = "--" if (layer, head) in pairs else "-"
    one.plot(distances, overlap[:, layer, head], style, linewidth=1, label=f"head {head}")
  one.set_title(f"KV heads of layer {layer} (dashed: unstable)", fontsize=9)
  marked = np.zeros((layers, heads), bool)
  marked[tuple(np.transpose(sorted(pairs)))] = True
  for label, chosen, color in (("stable", ~marked, "C0"), ("unstable", marked, "C1")):
    of_heads = overlap[:, chosen]
    low, high = np.percentile(of_heads, (10, 90), axis=1)
    every.fill_between(distances, low, high, color=color, alpha=0.2, linewidth=0)
    every.plot(
      distances, of_heads.mean(axis=1), color=color, label=f"{label}, {chosen.sum()} heads"
    )
  every.set_title("all heads: mean, and 10th to 90th percentile", fontsize=9)
  for axes in (one, every):
    axes.set_xlabel("steps between two lists")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
  one.set_ylabel("overlap beyond chance (RCO)")
  _entitled(figure, title)
  save(figure, path)


def _entitled(figure: Figure, title: str) -> None:
  figure.suptitle(title.replace("$", r"\$"), fontsize=9, x=0.01, horizontalalignment="left")
