"""From named tensors to parameters: the one place where names and shapes are checked.

Every reader (GGUF, safetensors) describes its file as a `Checkpoint` in the naming and the
[out, in] layout of Hugging Face; `llama_params` turns that into the tree of `models.llama`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.config import ModelConfig
from kvjax.types import Params
from models import families

EMBED = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
_SIZES = ("num_layers", "num_heads", "num_kv_heads", "embed_dim", "ffn_dim")
_SIZES += ("vocab_size", "max_tokens")
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


def model_config(source: str, head_dim: Any, **fields: Any) -> ModelConfig:
  """The static shape of a Llama, from the values that a file declares, whatever they are.

  Args:
    source: the file or folder, for messages.
    head_dim: None for `embed_dim` over `num_heads`.
    **fields: the other fields of `ModelConfig`.

  Raises:
    ValueError: a value of the wrong kind, out of range, or that does not fit the others.
  """

  def refuse(name: str, value: Any, expected: str) -> NoReturn:
    raise ValueError(
      f"{source}: {name} is {value!r}, expected {expected}; correct it or get the file again"
    )

  for name in _SIZES:
    if type(fields[name]) is not int or fields[name] < 1:
      refuse(name, fields[name], "a positive whole number")
  head_dim = fields["embed_dim"] // fields["num_heads"] if head_dim is None else head_dim
  if type(head_dim) is not int or head_dim < 2 or head_dim % 2:
    refuse("head_dim", head_dim, "a positive even number")
  if fields["num_heads"] % fields["num_kv_heads"]:
    refuse("num_kv_heads", fields["num_kv_heads"], f"a divisor of {fields['num_heads']} heads")
  for name in ("rope_theta", "norm_eps"):
    value = fields[name]
    if not isinstance(value, int | float) or not 0 < value < math.inf:
      refuse(name, value, "a positive number")
    fields[name] = float(value)
  return ModelConfig(family="llama", head_dim=head_dim, **fields)


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
  shapes = families.param_shapes(config)
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
