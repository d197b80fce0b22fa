"""From named tensors to parameters: the one place where names and shapes are checked.

Every reader (GGUF, safetensors) describes its file as a `Checkpoint` in the naming and the
[out, in] layout of Hugging Face; `llama_params` turns that into the tree of `models.llama`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.config import ModelConfig
from kvjax.types import Params
from models import llama

EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
LAYER_NAMES = {
  "attn_norm": "input_layernorm",
  "q": "self_attn.q_proj",
  "k": "self_attn.k_proj",
  "v": "self_attn.v_proj",
  "o": "self_attn.o_proj",
  "mlp_norm": "post_attention_layernorm",
  "gate": "mlp.gate_proj",
  "up": "mlp.up_proj",
  "down": "mlp.down_proj",
}


class Checkpoint(NamedTuple):
  """What a reader hands over. Nothing is read before `read` is called.

  Attributes:
    source: the file or folder, for messages.
    config: the static shape that the file declares.
    shapes: shape of every tensor in the file, matrices [out, in].
    read: `read(name)` gives one tensor as a float array of numpy.
    label: `label(name)` gives the file's own name of that tensor, for messages.
  """

  source: str
  config: ModelConfig
  shapes: Mapping[str, tuple[int, ...]]
  read: Callable[[str], np.ndarray]
  label: Callable[[str], str] = str


def layer_name(index: int, key: str) -> str:
  """Name in the file of parameter `key` of layer `index`."""
  return f"model.layers.{index}.{LAYER_NAMES[key]}.weight"


def llama_params(checkpoint: Checkpoint, dtype: str) -> Params:
  """Parameters of `models.llama` from a checkpoint.

  One tensor at a time is read, converted and copied, so that host memory peaks at about one tensor
  over the result.

  Args:
    checkpoint: config, shapes and reader.
    dtype: numpy name of the dtype of every parameter.

  Raises:
    ValueError: tensors are missing, unexpected or of the wrong shape; all are named at once.
  """
  expected = _expected_shapes(checkpoint.config)
  _check_tensors(checkpoint, expected)
  params = {
    "embed": _convert(checkpoint.read(EMBED), dtype),
    "norm": _convert(checkpoint.read(NORM), dtype),
  }
  if not checkpoint.config.tied_embeddings:
    params["head"] = _convert(checkpoint.read(HEAD), dtype)
  layers = tuple(
    {key: _convert(checkpoint.read(layer_name(index, key)).T, dtype) for key in LAYER_NAMES}
    for index in range(checkpoint.config.num_layers)
  )
  return params | {"layers": layers}


def _convert(tensor: np.ndarray, dtype: str) -> jax.Array:
  # The copy is what detaches the result from a memory-mapped file; jax may then share it.
  return jnp.asarray(np.array(tensor, dtype=jnp.dtype(dtype), order="C"))


def _expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
  """Shapes as they must be in the file: those of the parameters, the layers' turned round."""
  shapes = llama.param_shapes(config)
  expected = {EMBED: shapes["embed"].shape, NORM: shapes["norm"].shape}
  if not config.tied_embeddings:
    expected[HEAD] = shapes["head"].shape
  for index, layer in enumerate(shapes["layers"]):
    expected |= {layer_name(index, key): leaf.shape[::-1] for key, leaf in layer.items()}
  return expected


def _check_tensors(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> None:
  found, label = checkpoint.shapes, checkpoint.label
  missing = [label(name) for name in expected if name not in found]
  unexpected = [
    label(name) for name in found if name not in expected and not _harmless(name, checkpoint)
  ]
  wrong = [
    f"{label(name)} has shape {list(found[name])}, expected {list(shape)}"
    for name, shape in expected.items()
    if name in found and tuple(found[name]) != tuple(shape)
  ]
  problems = [
    f"{len(names)} {what}: {', '.join(names)}"
    for what, names in (
      ("missing tensors", missing),
      ("unexpected tensors", unexpected),
      ("tensors of the wrong shape", wrong),
    )
    if names
  ]
  if problems:
    raise ValueError(
      f"{checkpoint.source} does not hold the {checkpoint.config.family} model that its config "
      f"declares: {'; '.join(problems)}; get the file again or correct its config"
    )


def _harmless(name: str, checkpoint: Checkpoint) -> bool:
  """Tensors that carry nothing: stored rotary frequencies, and a second copy of a tied head."""
  tied_head = name == HEAD and checkpoint.config.tied_embeddings
  return tied_head or name.endswith(".rotary_emb.inv_freq")
