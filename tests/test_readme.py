"""What the README shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_python_of_the_readme_runs(monkeypatch, capsys):
  (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
  monkeypatch.chdir(ROOT)
  names: dict = {}
  with jax.numpy_dtype_promotion("standard"):
    exec(compile(code, "README.md", "exec"), names)
  assert names["runner"].decode_bytes.total > 0
  assert 0 < len(names["out"].tokens[0]) <= 32
  assert "CacheBytes" in capsys.readouterr().out
  assert (np.asarray(names["pages"][2]) >= -1).all()
