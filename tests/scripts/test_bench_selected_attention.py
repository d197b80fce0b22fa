"""The benchmark of attention over selected pages: its arithmetic, its pages, what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from models import PRESETS
from scripts import bench_selected_attention as bench


def test_the_floor_is_the_selected_keys_and_values():
  row = bench.row(PRESETS[bench.SHAPE], 4, 1024, 1e9, 0.6, 0.4)
  assert row["selected_bytes"] == 4 * 30 * 2 * 3 * 64 * 1024 * 4
  assert row["floor_s"] == pytest.approx(0.188743680)
  assert row["floor_ratio"] == pytest.approx(0.6 / 0.188743680)


def test_pages_are_chosen_in_the_row_and_head_that_owns_them():
  config = PRESETS[bench.SHAPE]
  pages = np.asarray(bench._page_ids(config, 2, 32, 8))
  assert pages.shape == (30, 2, 3, 8)
  np.testing.assert_array_equal(pages // 32, np.arange(180).reshape(30, 2, 3, 1) + 0 * pages)
  assert np.unique(pages).size == pages.size


@pytest.mark.parametrize(("tokens", "context"), [(1025, 8192), (1024, 512), (8, 512), (16, 500)])
def test_tokens_that_are_no_pages_of_the_context(tokens, context):
  with pytest.raises(ValueError, match="is not a multiple of --page_size=16 from 16 to"):
    bench._check_tokens([tokens], context, 16)
