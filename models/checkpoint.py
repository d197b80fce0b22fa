"""From named tensors to parameters: the one place where names, shapes and numbers are checked.

Every reader (GGUF, safetensors) describes its file as a `Checkpoint`; the tree that it becomes is
that of the family, `families.param_shapes`. Files keep a layer's matrix as [out, in], the tree as
[in, out], so it is turned on the way.
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

_SIZES = ("num_layers", "num_heads", "num_kv_heads", "embed_dim", "ffn_dim")
_SIZES += ("vocab_size", "max_tokens")
_OPTIONAL_SIZES = ("window_tokens", "token_dim")
_TABLES = ("embed", "positions", "head")  # rows are looked up; stored as the tree has them
_BIAS = "_bias"
_CHECKED_AT_ONCE = 1 << 20


class Checkpoint(NamedTuple):
  """What a reader hands over. Nothing is read before `read` is called.

  Attributes:
    source: the file or folder, for messages.
    config: the static shape that the file declares.
    names: what the file calls a parameter: its key in the tree -> name without ".weight" or
      ".bias", with {} for the number of the layer.
    shapes: shape of every tensor in the file, by the file's names, matrices [out, in]. Tensors
      that hold no parameter and that the reader knows are left out.
    read: `read(name)` gives one tensor as a float array of numpy.
  """

  source: str
  config: ModelConfig
  names: Mapping[str, str]
  shapes: Mapping[str, tuple[int, ...]]
  read: Callable[[str], np.ndarray]


def model_config(source: str, head_dim: Any, **fields: Any) -> ModelConfig:
  """The static shape of a model, from the values that a file declares, whatever they are.

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
  for name in _OPTIONAL_SIZES:
    value = fields.get(name)
    if value is not None and (type(value) is not int or value < 1):
      refuse(name, value, "a positive whole number, or nothing")
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
  return ModelConfig(head_dim=head_dim, **fields)


def read_params(checkpoint: Checkpoint, dtype: str) -> Params:
  """All parameters of a checkpoint, as a tree of the family.

  One tensor at a time is read, converted and copied, so that host memory peaks at about one tensor
  over the result.

  Args:
    checkpoint: config, names, shapes and reader.
    dtype: numpy name of the dtype of every parameter.

  Raises:
    ValueError: tensors are missing, unexpected or of the wrong shape, all of them named at once; or
      a tensor holds numbers that are not finite.
  """
  check(checkpoint)

  def leaf(path, _):
    return jnp.asarray(read_param(checkpoint, families.path_of(path), dtype))

  return jax.tree_util.tree_map_with_path(leaf, families.param_shapes(checkpoint.config))


def read_param(checkpoint: Checkpoint, path: str, dtype: str) -> np.ndarray:
  """One parameter, in memory of its own.

  Args:
    checkpoint: one that `check` has passed.
    path: its place in the tree, such as "embed" or "layers/3/q_bias".
    dtype: numpy name of its dtype.

  Raises:
    ValueError: it holds numbers that are not finite.
  """
  name = tensor_name(checkpoint.names, path)
  tensor = checkpoint.read(name)
  if _is_turned(path, tensor):
    tensor = tensor.T
  # The copy is what detaches the result from a memory-mapped file; jax may then share it.
  with np.errstate(over="ignore"):  # of a narrower dtype: the check has better words for it
    result = np.array(tensor, dtype=jnp.dtype(dtype), order="C")
  if bad := _count_not_finite(result):
    raise ValueError(
      f"{checkpoint.source}: tensor {name} holds {bad} numbers that are not finite in {dtype}, of "
      f"{result.size}; get the file again or load it in a wider dtype"
    )
  return result


def check(checkpoint: Checkpoint) -> None:
  """Holds the names and shapes of a file against those of the model that it declares.

  Raises:
    ValueError: tensors are missing, unexpected or of the wrong shape; all are named at once.
  """
  expected, found = _expected_shapes(checkpoint), checkpoint.shapes
  wrong = [
    f"{name} has shape {list(found[name])}, expected {list(shape)}"
    for name, shape in expected.items()
    if name in found and tuple(found[name]) != shape
  ]
  problems = [
    f"{len(names)} {what}: {', '.join(names)}"
    for what, names in (
      ("missing tensors", [name for name in expected if name not in found]),
      ("unexpected tensors", [name for name in found if name not in expected]),
      ("tensors of the wrong shape", wrong),
    )
    if names
  ]
  if problems:
    raise ValueError(
      f"{checkpoint.source} does not hold the {checkpoint.config.family} model that its config "
      f"declares: {'; '.join(problems)}; get the file again or correct its config"
    )


def tensor_name(names: Mapping[str, str], path: str) -> str:
  """What a file calls the parameter at this place of the tree; see `Checkpoint.names`."""
  *layer, key = path.removeprefix("layers/").split("/")
  kind = "bias" if key.endswith(_BIAS) else "weight"
  return f"{names[key.removesuffix(_BIAS)].format(*layer)}.{kind}"


def _expected_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
  """Shapes as they must be in the file, by the file's names."""
  expected = {}
  for path, leaf in families.by_path(families.param_shapes(checkpoint.config)).items():
    shape = leaf.shape[::-1] if _is_turned(path, leaf) else leaf.shape
    expected[tensor_name(checkpoint.names, path)] = shape
  head = tensor_name(checkpoint.names, "head")
  if checkpoint.config.tied_embeddings and head in checkpoint.shapes:
    expected[head] = tuple(checkpoint.shapes[head])  # a second copy of the embedding, never read
  return expected


def _is_turned(path: str, tensor: Any) -> bool:
  return tensor.ndim == 2 and path not in _TABLES


def _count_not_finite(tensor: np.ndarray) -> int:
  """In pieces, so that the check needs no memory to speak of."""
  flat = tensor.reshape(-1)
  return sum(
    int(np.count_nonzero(~np.isfinite(flat[start : start + _CHECKED_AT_ONCE])))
    for start in range(0, flat.size, _CHECKED_AT_ONCE)
  )
