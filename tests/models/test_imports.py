"""Shapes and random weights need no package that reads files."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys

class Missing:
  def find_spec(self, name, path=None, target=None):
    if name.split(".")[0] in ("safetensors", "tokenizers", "gguf", "huggingface_hub"):
      raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import kvjax, models
model = models.build(models.PRESETS["llama-3.1-8b"])
print(len(models.param_shapes(model.config, "bfloat16")["layers"]))
try:
  models.load
except ModuleNotFoundError as error:
  print(error)
"""


def test_a_model_is_built_where_no_reader_of_files_is_installed():
  out = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
  layers, missing = out.stdout.split()
  assert layers == "32" and missing in ("safetensors", "tokenizers", "gguf", "huggingface_hub")
