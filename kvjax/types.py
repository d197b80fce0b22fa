"""Axis letters and contracts. Imports nothing of kvjax but `config`.

Every comment, docstring and einsum of this code base uses these letters only:

    B  batch rows                 H  query heads            N  pages in a pool
    S  tokens of this call        K  KV heads               P  pages of a row (table width)
    T  key slots                  G  query heads a KV head  C  slots of a page
    L  layers                     D  head size              M  selected pages
    E  model width                F  feed-forward width     V  vocabulary

A dtype comes before its shape: `i32[B, P]`; `f` is the dtype of the model or of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from kvjax.config import CacheConfig, ModelConfig

Params = Any  # a pytree of arrays
State = Any  # a pytree of arrays

DENSE = "dense"  # a layer that attends to everything: contiguous layout
SELECT = "select"  # a layer that attends to what its policy selects: paged layout


class Rotate(Protocol):
  """The position rule of a model, applied to queries and keys alike.

  `rotate(x, positions)`: x f[B, S, heads, D], positions i32[B, S] -> f[B, S, heads, D]. Models
  whose positions are not in the attention (OPT) return x.
  """

  def __call__(self, x: jax.Array, positions: jax.Array, /) -> jax.Array: ...


class Attend(Protocol):
  """The one function by which a model attends; the engine builds it (`kvjax.engine.attend`).

  `attend(layer, q, k, v, cache, hidden)`: layer is a static int, q f[B, S, H, D], k and v
  f[B, S, K, D], all three before `Rotate`, hidden f[B, S, E] the input of the layer's
  projections. Returns f[B, S, H, D] and the cache that now holds k and v.
  """

  def __call__(
    self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array, cache: State, hidden: jax.Array, /
  ) -> tuple[jax.Array, State]: ...


class Axes(NamedTuple):
  """Mesh axes over which the weights of a model are split; None where every device has them whole.

  Attributes:
    inner: splits H, K and F: a device has some of the heads and some of the feed-forward.
    vocab: splits V: a device has some rows of the embedding and of the head.
  """

  inner: str | None = None
  vocab: str | None = None


WHOLE = Axes()


class Model(NamedTuple):
  """What is computed: static config and pure functions.

  Attributes:
    config: the static shape.
    init: `init(key, dtype) -> params`, random weights.
    forward: `forward(params, tokens i32[B, S], positions i32[B, S], cache, attend)
      -> f[B, S, E], cache`: embeddings, layers and the final norm, without the head.
    query: `query(params, layer, hidden f[B, S, E]) -> f[B, S, H, D]`: queries that a layer makes of
      the input of its projections, before the position rule. Policies that look ahead give it the
      input of an earlier layer.
    keys_values: `keys_values(params, layer, hidden f[B, S, E]) -> k, v f[B, S, K, D]`: what a layer
      makes of the input of its projections, before the position rule; forward makes them so too.
      Who keeps hidden instead of keys and values has them back by it.
    unembed: `unembed(params, x f[B, E]) -> f32[B, V]`, the head.
    rotate: the position rule.
    part: `part(config, axes) -> Model`, what one device of a mesh computes: the same model with the
      heads, F and V that config leaves it, which meets the other parts over the axes.
  """

  config: ModelConfig
  init: Callable[..., Params]
  forward: Callable[..., tuple[jax.Array, State]]
  query: Callable[[Params, int, jax.Array], jax.Array]
  keys_values: Callable[[Params, int, jax.Array], tuple[jax.Array, jax.Array]]
  unembed: Callable[[Params, jax.Array], jax.Array]
  rotate: Rotate
  part: Callable[[ModelConfig, Axes], Model]


class LayerPlan(NamedTuple):
  """Static roles of the L layers.

  Attributes:
    roles: `DENSE` or `SELECT` each.
    watched: dense layers for which the policy's `preprocess` is called too: to choose tokens for
      later layers, or to look ahead at the next one.
    shared: of each selecting layer, the row of the first one that selects the same tokens as it
      does; then what a store plans for that one serves for all. Empty where each selects its own.
    on_device: of each selecting layer, the KV heads whose pages should all stay on the device, for
      stores that place heads apart. Empty for none.
  """

  roles: tuple[str, ...]
  watched: tuple[int, ...] = ()
  shared: tuple[int, ...] = ()
  on_device: tuple[tuple[int, ...], ...] = ()

  @property
  def select_layers(self) -> tuple[int, ...]:
    """Indices of the layers that select, in order; a layer's place here is its `row`."""
    return tuple(layer for layer, role in enumerate(self.roles) if role == SELECT)


class Inputs(NamedTuple):
  """What a policy may look at. New fields are added as methods need them; a policy takes what it
  uses and ignores the rest, which jit then never computes.

  Attributes:
    layer: static index of the layer.
    row: static index of the layer among those that select; -1 for a dense layer that is watched.
    lengths: i32[B], tokens of each row including those of this call.
    first: i32[B], first position that the newest token sees: 0, or more where the model has a
      sliding window. What lies before it is masked whatever a policy selects.
    slot_positions: i32[B, K, T], true position of the token in each slot of the row's pages,
      negative where there is none.
    keys: `keys() -> f[B, K, T, D]`, what the slots hold, as the store keeps it; anything where
      there is no token. Copies them all: for stores that hold little, or for prefill. A layer that
      selects may be asked for some pages of the row alone: `keys(pages: i32[B, K, M]) ->
      f[B, K, M*C, D]`, which copies these.
    q: f[B, S, H, D], after the position rule. This and the fields below are None when a dropping
      policy is asked after prefill what it keeps.
    k: f[B, S, K, D], as the store keeps them.
    v: f[B, S, K, D].
    positions: i32[B, S], true positions.
    valid: bool[B, S], False for padding. In decode False for a row that sits the step out: its
      length is 0 and its position beyond every slot, so that what a policy writes by position goes
      nowhere, and what it holds of the row must stay as it is.
    hidden: f[B, S, E], input of the layer's projections.
    project: `project(layer) -> f[B, S, H, D]`: queries that another layer would make of hidden,
      after the position rule.
  """

  layer: int
  row: int
  lengths: jax.Array
  first: jax.Array
  slot_positions: jax.Array
  keys: Callable[..., jax.Array]
  q: Any = None
  k: Any = None
  v: Any = None
  positions: Any = None
  valid: Any = None
  hidden: Any = None
  project: Any = None


class Selection(NamedTuple):
  """What one layer attends to now; static width.

  Attributes:
    pages: i32[B, K, M], pages of the row (places in its table, not in the pool). [B, H, M] when
      each query head has its own.
    mask: bool[B, K, M, C or 1], slots that count. The store also masks slots without a token.
    slots: None for whole pages. For single tokens i32[B, K, M], the slot in each of the pages, of
      which the same one may then come several times; the mask is [B, K, M, 1].
    tokens: None, or the same single tokens once more, bool[B, K, T] over the slots of the row; it
      may end before the last page does. A store reads the form that suits it, and jit computes that
      one only.
  """

  pages: jax.Array
  mask: jax.Array
  slots: jax.Array | None = None
  tokens: jax.Array | None = None


class Recalled(NamedTuple):
  """What a store gives back for a selection.

  Attributes:
    pools: the device pages that are read, `kvjax.cache.paged.Pools`.
    pages: i32[B, K, M], rows of the pools; None where they are all of them, list after list.
    mask: bool[B, K, M, C], slots that count and hold a token; [B, K, M, 1] with slots.
    positions: i32[B, K, M, C or 1], their true positions.
    slots: None, or i32[B, K, M] as in `Selection`.
  """

  pools: Any
  pages: jax.Array | None
  mask: jax.Array
  positions: jax.Array
  slots: jax.Array | None = None


class Policy(NamedTuple):
  """Which KV matters now: OPKV's five callbacks as pure functions, and what they promise.

  Attributes:
    name: its name in tables and on command lines; `make_policy` appends the options of a spec.
    budget_tokens: most tokens that a selecting layer reads in a step, for each list of them: of a
      KV head, or of a query head where each has its own. None for all of them.
    stores: names of the stores it may run on, the default first.
    register: `register(model_config, cache_config) -> LayerPlan, state`: roles and initial state.
    preprocess: `preprocess(state, inputs) -> state`, for each prefill chunk and decode token of a
      selecting layer, after the store has taken the keys.
    select: `select(state, inputs) -> Selection, state`, in decode.
    ahead: `ahead(state, row) -> Selection | None`: what selecting layer `row` will attend to,
      where the policy knows it before that layer runs, so that its recall can begin while another
      layer attends; None where it never does.
    fetch: overrides the store's; None for the store's own.
    recall: overrides the store's; None for the store's own.
    settle: `settle(state, inputs) -> state`, for each selecting layer once between prefill and
      decode, on stores that drop nothing: what takes the whole prompt at once. None for nothing.
    keep: `keep(state, inputs) -> bool[B, K, T], state`, asked once after prefill: which slots
      survive, at most `keeps` of them. None for a policy that drops nothing. (This and the two
      below are not among OPKV's callbacks, whose sparsity is recallable by definition.)
    keeps: `keeps(row, rows, heads, capacity) -> int[K]`, tokens that each KV head of the selecting
      layer `row` of `rows` holds at most, those of decode included. None for budget_tokens.
    evict: `evict(state, inputs) -> i32[B, K]`, the slot that the new token takes where a row is
      full, one with a position that is not negative. None where decode drops nothing.
    cache_positions: `cache_positions(positions, lengths i32[B, 1, ...]) -> positions`, the position
      rule: None for true positions, with keys kept rotated; a function for positions inside the
      cache, with keys kept unrotated and turned when they are read.
    page_size: C that the budget was divided by.
    asked_tokens: the budget that `make_policy` was asked for, by which results are compared; None
      where there is none to ask for. Whole pages may be fewer, and SnapKV holds what is generated
      besides.
    joins_heads: what it selects in one KV head depends on others, or on which head it is; then
      heads may not be split over devices, of which each would know its own only.
  """

  name: str
  budget_tokens: int | None
  stores: tuple[str, ...]
  register: Callable[[ModelConfig, CacheConfig], tuple[LayerPlan, State]]
  preprocess: Callable[[State, Inputs], State]
  select: Callable[[State, Inputs], tuple[Selection, State]]
  ahead: Callable[[State, int], Selection | None] | None = None
  fetch: Callable[..., Any] | None = None
  recall: Callable[..., Any] | None = None
  settle: Callable[[State, Inputs], State] | None = None
  keep: Callable[[State, Inputs], tuple[jax.Array, State]] | None = None
  keeps: Callable[[int, int, int, int], Sequence[int]] | None = None
  evict: Callable[[State, Inputs], jax.Array] | None = None
  cache_positions: Callable[[jax.Array, jax.Array], jax.Array] | None = None
  page_size: int | None = None
  asked_tokens: int | None = None
  joins_heads: bool = False


class Store(NamedTuple):
  """Where KV lives and how it comes back: pure functions on a cache.

  Attributes:
    name: its name in tables and on command lines.
    drops: it forgets what the policy does not keep.
    on_host: it keeps every page in host memory, beside those that prefill fills on the device.
    decode_config: `decode_config(cache_config, policy) -> CacheConfig` of the cache that decodes.
    slot_positions: `slot_positions(cache, row, lengths) -> i32[B, K, T]`, see `Inputs`; -1 for a
      slot that is free.
    append: `append(cache, row, k f[B, K, D], v, positions i32[B], slots i32[B, K]) -> cache`: one
      token a row; slots is where it goes.
    place: `place(cache, row, positions i32[B], victims) -> i32[B, K], cache`, the slot of a new
      token; `victims()` asks the policy for the slots to reuse, and is None where it drops none.
    fetch: `fetch(cache, row, selection, lengths) -> ticket, cache`: begins to bring it back. What
      another layer does meanwhile does not depend on it, so it does not block.
    recall: `recall(cache, row, ticket, lengths) -> Recalled, cache`.
    release: `release(cache, row, out) -> out, cache`: after the layer has attended with result out.
    seal: `seal(cache, policy, cache_config, layer_plan) -> cache`: from the cache that prefilled to
      the one that decodes.
    insert: `insert(state, one, slot i32[]) -> state`: the store's state of a batch after one of its
      rows became what `one`, the state of a sealed batch of one, holds. None where the rows of each
      of its arrays lie one after another, so that the engine can do it.
    free: `free(state, ended bool[B]) -> state`: gives up what rows hold of what rows share. None
      where they share nothing.
    tiers_heads: where `on_host`, the pages of heads that stay on the device (`LayerPlan.on_device`)
      are not there. As these differ from head to head, devices of a mesh cannot each have a part.
  """

  name: str
  drops: bool
  on_host: bool
  decode_config: Callable[[CacheConfig, Policy], CacheConfig]
  slot_positions: Callable[..., jax.Array]
  place: Callable[..., tuple[jax.Array, State]]
  append: Callable[..., State]
  fetch: Callable[..., tuple[Any, State]]
  recall: Callable[..., tuple[Recalled, State]]
  release: Callable[..., tuple[jax.Array, State]]
  seal: Callable[..., State]
  insert: Callable[[State, State, jax.Array], State] | None = None
  free: Callable[[State, jax.Array], State] | None = None
  tiers_heads: bool = False
