"""Golden logits and greedy tokens of every family, by Hugging Face transformers.

    PYTHON -m scripts.make_goldens --out=tests/data/families/golden.json

PYTHON is an interpreter with torch, transformers, safetensors and absl; 3.11 will do, as nothing of
kvjax is imported but `scripts.golden_models`, which makes the weights. The committed numbers were
made with transformers 5.24.0 and torch 2.13.0 on a CPU, in f32; the file says so too.

Rows are run together, padded on the left and with a mask, as transformers' `generate` does it, and
the first one alone as well: both must agree. Dynamic rotary scaling is the exception: transformers
takes the length of the longest row for all rows, so there each row is run alone.

Greedy tokens are worth comparing only where the best token is clearly the best and the text is not
one token over and over; seeds are tried until every step of every row is like that.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from scripts import golden_models
from scripts.golden_models import CASES, NEW_TOKENS, VOCAB_SIZE, Case

MARGIN = 2e-3  # of the best logit over the second
DISTINCT = 8  # least number of different tokens in an answer
PLACES = list(range(3, VOCAB_SIZE, 10))  # of the vocabulary: where logits are kept
SEEDS = 40
_OUT = flags.DEFINE_string("out", None, "File to write.", required=True)


def main(argv: list[str]) -> None:
  """Asks transformers about every case and writes what it says."""
  del argv
  torch, transformers = map(importlib.import_module, ("torch", "transformers"))
  torch.set_grad_enabled(False)
  transformers.logging.disable_progress_bar()
  versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
  golden = {
    "made_with": f"{versions}, f32 on a CPU",
    "places": PLACES,
    "cases": {name: golden_case(name, case) for name, case in CASES.items()},
  }
  path = Path(_OUT.value)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(_compact(golden), encoding="utf-8")
  print(f"wrote {path}, {path.stat().st_size / 1000:.0f} kB")


def golden_case(name: str, case: Case) -> dict[str, Any]:
  """Seed, digest of the weights, and for each row its answer and logits before its first and last
  token."""
  prompts = golden_models.prompts()
  for seed in range(SEEDS):
    with tempfile.TemporaryDirectory() as folder:
      digest = golden_models.write(Path(folder) / name, case, seed)
      logits = _run(Path(folder) / name, prompts, alone="dynamic" in name)
    tokens = logits.argmax(-1)
    second, best = np.moveaxis(np.sort(logits, axis=-1)[..., -2:], -1, 0)
    distinct = min(len(set(row)) for row in tokens.tolist())
    if (best - second).min() > MARGIN and distinct >= DISTINCT:
      break
  else:
    raise RuntimeError(f"{name}: no seed below {SEEDS} has clear greedy tokens")
  print(
    f"{name}: seed {seed}, margin {(best - second).min():.4f}, logits to {abs(logits).max():.1f}"
  )
  rows = [
    {
      "tokens": tokens[row].tolist(),
      "first_logits": _rounded(logits[row, 0]),
      "last_logits": _rounded(logits[row, -1]),
    }
    for row in range(len(prompts))
  ]
  return {"seed": seed, "sha256": digest, "rows": rows}


def _run(folder: Path, prompts: list[list[int]], alone: bool) -> np.ndarray:
  """f32[B, NEW_TOKENS, V], logits of every new token."""
  torch, transformers = map(importlib.import_module, ("torch", "transformers"))
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager"
  ).eval()
  if alone:
    return np.concatenate([_generate(model, [prompt]) for prompt in prompts])
  logits = _generate(model, prompts)
  first = _generate(model, prompts[:1])
  np.testing.assert_allclose(logits[:1], first, atol=5e-5, rtol=0)
  return logits


def _generate(model: Any, prompts: list[list[int]]) -> np.ndarray:
  torch = importlib.import_module("torch")
  longest = max(map(len, prompts))
  padding = [longest - len(prompt) for prompt in prompts]
  out = model.generate(
    torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]),
    attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
    max_new_tokens=NEW_TOKENS,
    do_sample=False,
    output_logits=True,
    return_dict_in_generate=True,
    pad_token_id=0,
  )
  logits = torch.stack(out.logits, dim=1).numpy()
  assert logits.shape == (len(prompts), NEW_TOKENS, VOCAB_SIZE)
  return logits


def _rounded(logits: np.ndarray) -> list[float]:
  return [round(float(x), 6) for x in logits[PLACES]]


def _compact(golden: dict[str, Any]) -> str:
  """JSON with one line for each row of each case."""
  text = json.dumps(golden)
  for start in ('"cases": ', '"rows": ', '{"tokens"', '{"seed"'):
    text = text.replace(start, f"\n{start}")
  return text + "\n"


if __name__ == "__main__":
  app.run(main)
