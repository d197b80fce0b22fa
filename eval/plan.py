"""What a run is about to do, for reading before it does it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from eval import harness, layers, loop, results, tables
from eval.loop import Grid

_SIZES = (
  *("policy", "store", "budget_tokens", "device_kv_bytes", "metadata_bytes", "host_kv_bytes"),
  "peak_kv_bytes",
)


def text(grid: Grid, data: Mapping[str, str], out_dir: Path, answered: int) -> str:
  """Model, data, tasks, layers that select, and bytes.

  Args:
    grid: what will run.
    data: name -> sha256 of each file that the examples were made of.
    out_dir: where results go.
    answered: how many answers are there from an earlier start of the run.
  """
  shown = [
    {
      "task": task,
      "questions": len(group),
      "prompt_tokens": max(len(one.prompt_ids) for one in group),
      "question_tokens": max(one.question_tokens for one in group),
      "answer_tokens": max(one.new_tokens for one in group),
      "chat_template": "yes" if group[0].chat else "no",
    }
    for task, group in loop.by_task(grid.examples).items()
  ]
  sizes = [harness.case_of(runner) | results.byte_fields(runner) for runner in grid.runners]
  batch = grid.runners[0].prefill_config.batch_size
  names = [f"{name}, sha256 {digest[:16]}" for name, digest in data.items()]
  going_on = f"; {answered} are answered already" if answered else ""
  return "\n".join(
    [
      f"model      {grid.loaded.name}, sha256 {grid.loaded.content_hash[:16]}",
      *(f"{'' if row else 'data':<10} {name}" for row, name in enumerate(names)),
      f"questions  {len(grid.examples)} for each of {len(grid.runners)} caches, {batch} at a time"
      f"{going_on}",
      f"layers     {layers.summary(grid.runners) or '-'}",
      f"results    {out_dir}",
      "",
      tables.table(shown, tuple(shown[0])),
      "",
      "to be allocated:",
      tables.table(sizes, _SIZES),
      "",
    ]
  )
