"""One object on disk: what is kept of a stretch of one conversation, and whose it is.

    8 bytes   magic
    u64, u64  length and xxh3 of the header, little endian
    header    JSON; spaces at its end let the payload begin at a multiple of 64
    payload   f[T, L, 2, K, D], keys and values of T tokens, little endian; or f[T, L*E + 2],
              activations (`kvjax.bidaw.tensor_cache.packed`)

The header has all token ids of the conversation up to here, a few bytes each beside kilobytes of
keys and values, so that what is damaged can be computed anew. The tokens before an object are as
good as its name: keys and values hang on nothing else but the model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import struct
from typing import NamedTuple

import ml_dtypes
import numpy as np
import xxhash

LAYOUT = 2  # of objects, and of names in their folder; raise it when either changes
KEYS_VALUES, ACTIVATIONS = "keys and values", "activations"  # what is kept of a token
_MAGIC, _ALIGN = b"kvjaxkv\n", 64
_FIXED = struct.Struct("<8sQQ")


class Damaged(Exception):
  """An object that is not as it was written."""


class Foreign(Exception):
  """An object of another model, tokenizer, tenant or conversation."""


@dataclasses.dataclass(frozen=True)
class Stamp:
  """What keys and values hang on besides token ids; those of another stamp are never returned.

  Attributes:
    model: content hash of the weights.
    tokenizer: hash of what made the token ids; "" where there is none.
    positions: the position rule of the keys, in words.
    dtype: numpy name of their dtype.
    shape: (L, K, D); of activations (L, 1, E).
    tenant: whose conversations they are.
    tensors: `KEYS_VALUES` or `ACTIVATIONS`.
    layout: of the objects.
  """

  model: str
  tokenizer: str
  positions: str
  dtype: str
  shape: tuple[int, int, int]
  tenant: str = ""
  tensors: str = KEYS_VALUES
  layout: int = LAYOUT

  @property
  def digest(self) -> str:
    """Its name as a folder."""
    text = json.dumps(dataclasses.asdict(self), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]

  @property
  def numpy_dtype(self) -> np.dtype:
    """The dtype, also where numpy has none of that name."""
    return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

  @property
  def token_shape(self) -> tuple[int, ...]:
    """Of one token: (L, 2, K, D); of activations (L*E + 2,)."""
    layers, heads, size = self.shape
    if self.tensors == ACTIVATIONS:
      return (layers * heads * size + 2,)
    return layers, 2, heads, size

  @property
  def token_bytes(self) -> int:
    """Of what is kept of one token."""
    return math.prod(self.token_shape) * self.numpy_dtype.itemsize


class Header(NamedTuple):
  """What an object says of itself.

  Attributes:
    stamp: as a dictionary, since that of another version may have other fields.
    user: whose conversation it was written for.
    tokens: i32[n], all ids of the conversation, at least end of them.
    start: position of its first token.
    end: position after its last one; start where it holds ids only.
    through: hash of the ids before end.
    payload: xxh3 of the payload.
  """

  stamp: dict
  user: int
  tokens: np.ndarray
  start: int
  end: int
  through: str
  payload: int


def hash_of(tokens: np.ndarray) -> str:
  """Of token ids i32[n]."""
  return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(tokens, "<i4").data)


def pack(stamp: Stamp, user: int, tokens: np.ndarray, start: int, kv: np.ndarray) -> bytes:
  """The object of kv f[T, L, 2, K, D], which begins at position start of tokens i32[n]."""
  end, payload = start + len(kv), np.ascontiguousarray(kv).reshape(-1).view(np.uint8).data
  described = {
    "stamp": dataclasses.asdict(stamp),
    "user": user,
    "tokens": tokens.tolist(),
    "start": start,
    "end": end,
    "through": hash_of(tokens[:end]),
    "payload": xxhash.xxh3_64_intdigest(payload),
  }
  header = json.dumps(described).encode()
  header += b" " * (-(_FIXED.size + len(header)) % _ALIGN)
  fixed = _FIXED.pack(_MAGIC, len(header), xxhash.xxh3_64_intdigest(header))
  return b"".join((fixed, header, payload))


def header_bytes(beginning: bytes) -> int:
  """Bytes before the payload, of an object of which at least the first 24 bytes are given.

  Raises:
    Damaged: it does not begin like an object.
  """
  if len(beginning) < _FIXED.size:
    raise Damaged(f"it has {len(beginning)} bytes")
  magic, length, _ = _FIXED.unpack_from(beginning)
  if magic != _MAGIC:
    raise Damaged("it does not begin as objects do")
  return _FIXED.size + length


def header_of(data: bytes) -> Header:
  """The header of an object, of which at least all before the payload is given.

  Raises:
    Damaged: it is not as it was written.
  """
  end, (_, _, checksum) = header_bytes(data), _FIXED.unpack_from(data)
  header = data[_FIXED.size : end]
  if len(data) < end or xxhash.xxh3_64_intdigest(header) != checksum:
    raise Damaged("its header is not what was written")
  described = json.loads(header)
  return Header(**described | {"tokens": np.array(described["tokens"], np.int32)})


def check(header: Header, stamp: Stamp, user: int | None = None) -> None:
  """Raises Foreign where the header is not of this stamp, or of another user than a given one."""
  expected = json.loads(json.dumps(dataclasses.asdict(stamp)))
  if header.stamp != expected:
    fields = header.stamp.keys() | expected.keys()
    differ = sorted(f for f in fields if header.stamp.get(f) != expected.get(f))
    raise Foreign(f"it is of another {' and '.join(differ)}")
  if user is not None and header.user != user:
    raise Foreign(f"it is of user {header.user}")


def unpack(data: bytes, stamp: Stamp, tokens: np.ndarray) -> np.ndarray:
  """Keys and values f[T, L, 2, K, D] of an object, a view of its bytes.

  Args:
    data: the whole object.
    stamp: that it must have.
    tokens: i32[n], the ids of the conversation, on which the object must follow.

  Raises:
    Damaged: it is not as it was written.
    Foreign: it is not of this stamp, or not of these tokens.
  """
  header = header_of(data)
  check(header, stamp)
  if header.through != hash_of(tokens[: header.end]):
    raise Foreign("it is of another conversation")
  begin, size = header_bytes(data), (header.end - header.start) * stamp.token_bytes
  if len(data) != begin + size:
    raise Damaged(f"it has {len(data)} bytes and not {begin + size}")
  payload = np.frombuffer(data, np.uint8, offset=begin)
  if xxhash.xxh3_64_intdigest(payload.data) != header.payload:
    raise Damaged("its keys and values are not what was written")
  return payload.view(stamp.numpy_dtype).reshape(-1, *stamp.token_shape)
