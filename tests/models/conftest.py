"""Tests that are not slow keep their hash stamps and downloads in a folder of their own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_cache(request, tmp_path, monkeypatch):
  if not request.node.get_closest_marker("slow"):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
