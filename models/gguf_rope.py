"""The rotary scaling of a GGUF file.

Linear and yarn are in the metadata. Llama 3's is not: converters store what it does, one divisor
for each pair of a head, and leave out what it was made of. Llama 3.1, 3.2 and 3.3 differ in
`factor` alone, which is what the slowest pair is divided by: a scaling is built from that, and must
then give the stored divisors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kvjax.config import ModelConfig, RopeScaling
from models.rope import pair_frequencies

_LLAMA3_ORIGINAL_TOKENS = 8192
_NEUTRAL = {  # settings that are not followed, and the value at which they change nothing
  "rope.scaling.attn_factor": 1,
  "rope.scaling.yarn_attn_factor": 1,
  "rope.scaling.yarn_ext_factor": 1,
  "rope.scaling.yarn_log_multiplier": 0,
  "rope.scaling.alpha": 1,
  "rope.scale_linear": 1,
}


def read_scaling(
  model: Mapping[str, Any], divisors: gguf.ReaderTensor | None, config: ModelConfig, path: Path
) -> RopeScaling:
  """The scaling that a file declares.

  Args:
    model: its metadata, keys without the name of the architecture.
    divisors: its tensor f32[D/2] of the divisors, if it has one.
    config: of its fields, head_dim, rope_theta and max_tokens count.
    path: the file, for messages.

  Raises:
    ValueError: a kind of scaling that is not known here, or divisors that no kind explains.
  """
  for key, neutral in _NEUTRAL.items():
    if model.get(key, neutral) != neutral:
      raise ValueError(f"{path}: {key} {model[key]!r} is not supported, expected {neutral}")
  factor = model.get("rope.scaling.factor", 1.0)
  # A file with a factor and no kind means linear.
  kind = model.get("rope.scaling.type", "none" if factor == 1 else "linear")
  original = model.get("rope.scaling.original_context_length")
  if divisors is not None:
    if kind != "none":
      raise ValueError(f"{path}: rope scaling {kind} beside {divisors.name} is not supported")
    return _from_divisors(divisors, original or _LLAMA3_ORIGINAL_TOKENS, config, path)
  if kind == "none":
    return RopeScaling()
  if not factor >= 1:
    raise ValueError(f"{path}: rope.scaling.factor is {factor}, expected at least 1")
  if kind == "linear":
    return RopeScaling("linear", factor)
  if kind == "yarn":
    betas = {
      name: model[f"rope.scaling.yarn_{name}"]
      for name in ("beta_fast", "beta_slow")
      if f"rope.scaling.yarn_{name}" in model
    }
    return RopeScaling("yarn", factor, original or config.max_tokens, **betas)
  raise ValueError(f"{path}: unknown rope scaling {kind!r}, expected none, linear or yarn")


def _from_divisors(
  tensor: gguf.ReaderTensor, original: int, config: ModelConfig, path: Path
) -> RopeScaling:
  divisors = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
  if (divisors == 1).all():
    return RopeScaling()
  scaling = RopeScaling("llama3", float(np.clip(divisors.max(), 1, None)), original)
  plain, scaled = (
    pair_frequencies(config.rope_theta, config.head_dim, one) for one in (RopeScaling(), scaling)
  )
  if divisors.shape != plain.shape or not np.allclose(divisors, plain / scaled, rtol=1e-4):
    raise ValueError(
      f"{path}: {tensor.name} is not the rope scaling of Llama 3 with factor {scaling.factor:g} "
      f"and {original} original tokens; use the model's folder with safetensors instead"
    )
  return scaling
