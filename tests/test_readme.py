"""What the README shows runs as it stands there, on the lower layers of the model that it loads."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import models

ROOT = Path(__file__).resolve().parents[1]


def _lower_layers(name: str, load=models.load):
  """Two that are dense and two that select: thirty take a minute to compile."""
  loaded = load(name)
  model = models.build(dataclasses.replace(loaded.model.config, num_layers=4))
  params = loaded.params | {"layers": loaded.params["layers"][:4]}
  return loaded._replace(model=model, params=params)


@pytest.mark.slow
def test_the_python_of_the_readme_runs(monkeypatch, capsys):
  (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
  monkeypatch.chdir(ROOT)
  monkeypatch.setattr(models, "load", _lower_layers)
  names: dict = {}
  with jax.numpy_dtype_promotion("standard"):
    exec(compile(code, "README.md", "exec"), names)
  assert names["runner"].decode_bytes.total > 0
  assert 0 < len(names["out"].tokens[0]) <= 32
  assert "CacheBytes" in capsys.readouterr().out
  assert (np.asarray(names["pages"][2]) >= -1).all()
