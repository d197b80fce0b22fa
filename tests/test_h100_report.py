"""The kept report of FlexiCache's step on an H100, and how its schedule is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvjax import make_policy
from tests import h100_report as report

PAGE = Path(__file__).resolve().parents[1] / "docs" / "h100_flexicache.md"
HLO = """
%body (x: f32[1]) -> f32[1] {
  %x = f32[1]{0} parameter(0)
  ROOT %not.mine = f32[1]{0} fusion(%x), kind=kLoop
}

ENTRY %main (p: f32[1]) -> f32[1] {
  %p = f32[1]{0} parameter(0)
  %f.1 = f32[1]{0} fusion(%p), kind=kLoop, calls=%body
  %move.1 = ((f32[1]{0}), f32[1]{0}) call-start(%f.1), MARK
  %f.2 = f32[1]{0} fusion(%p), kind=kLoop, calls=%body
  %move.2 = ((f32[1]{0}), f32[1]{0}) call-start(%f.1), MARK
  %done.1 = f32[1]{0} call-done(%move.1), MARK
  %done.2 = f32[1]{0} call-done(%move.2), MARK
  %g = (f32[1]{0}) tuple(%done.1)
  %attend.1 = f32[1]{0} custom-call(%g), custom_call_target="mosaic_gpu_v2"
  %other = ((f32[1]{0}), f32[1]{0}) call-start(%f.1)
  ROOT %f.3 = f32[1]{0} fusion(%attend.1), kind=kLoop, calls=%body
}
""".replace(
  "MARK",
  'frontend_attributes={_xla_stream_annotation="1",inlineable="false"}, '
  'metadata={op_name="jit(_decode)/jit(_move_pages)"}',
)


def test_the_schedule_is_what_the_entry_launches():
  launched = report.schedule(HLO)
  recalls = ["recall", "fusion", "recall", "recalled", "recalled"]
  assert launched == ["fusion", *recalls, "attention", "call-start", "fusion"]
  assert report.beside(launched) == [1, 0]
  told = report.told_of_schedule(launched)
  assert "9 launches, 1 attentions; 2 recalls" in told
  assert "0 to 1 other launches between begin and end" in told


@pytest.mark.parametrize("place", range(3), ids=["dense", *map(str, report.BUDGETS)])
def test_the_kept_page_says_what_the_cache_of_today_takes(place):
  runner = (
    report.runner_of(make_policy("dense"), "resident")
    if place == 0
    else report.flexicache(report.BUDGETS[place - 1])
  )
  kept, rows = runner.decode_bytes, {}
  for line in PAGE.read_text("utf-8").splitlines():
    name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
    rows[name] = cells
  assert rows["keys and values on the device (closed form)"][place] == f"{kept.keys_values:,}"
  assert rows["bounds, lists, tables on the device"][place] == f"{kept.total - kept.keys_values:,}"
  assert rows["keys and values on the host"][place] == f"{kept.host:,}"
  assert rows["compiler: updated in place, device"][place] == f"{kept.total:,}"
  assert rows["compiler: updated in place, host"][place] == f"{kept.host:,}"
  assert rows["compiler: temporaries, host"][place] == rows["copies of 64 MB or more"][place] == "0"
  if place:
    assert kept.keys_values == report.closed_form(runner)
