"""Algorithm 1 of OPKV on blocks that are written out, and against sets on random ones."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache.counting import places, running, smallest
from kvjax.opkv.blocks import Blocks, no_blocks
from kvjax.opkv.eviction import FIFO
from kvjax.opkv.retrieval import least_tokens, retrieve
from kvjax.opkv.sub_block_manager import Settings
from tests.kvjax.opkv_by_hand import Pool

CAPACITY = 64


def blocks_of(*held: tuple[int, list[int]], page_size: int = 16, spare: int = 4) -> Blocks:
  """Blocks (list, tokens), in the order of their ids, and free ones behind them."""
  held = (*held, *[(-1, [])] * spare)
  blocks = no_blocks(len(held), page_size, FIFO, 2, CAPACITY)
  tokens = np.full((len(held), page_size), -1, np.int32)
  for block, (_, mine) in enumerate(held):
    tokens[block, : len(mine)] = mine
  owner = np.array([x for x, _ in held], np.int32)
  return blocks._replace(tokens=jnp.asarray(tokens), owner=jnp.asarray(owner))


def selection(*lists) -> jax.Array:
  mask = np.zeros((len(lists), CAPACITY), bool)
  for x, tokens in enumerate(lists):
    mask[x, list(tokens)] = True
  return jnp.asarray(mask)


@cache
def compiled(theta: int, recheck: bool, width: int):
  return jax.jit(partial(retrieve, theta=theta, recheck=recheck, width=width))


def hits_and_missing(blocks, selected, theta=10, recheck=True, width=9):
  """Ids of the hits, and the missing tokens of each list."""
  found = compiled(theta, recheck, width)(blocks, selected)
  missing = [np.flatnonzero(row).tolist() for row in found.missing]
  return np.flatnonzero(found.hit).tolist(), missing


@pytest.mark.parametrize(
  ("rho", "page_size", "theta"),
  [(0.6, 16, 10), (0.6, 8, 5), (0.6, 32, 20), (1.0, 16, 16), (0.3, 10, 3), (1e-3, 16, 1)],
)
def test_theta(rho, page_size, theta):
  assert least_tokens(rho, page_size) == theta


@pytest.mark.parametrize("recheck", [False, True])
def test_nine_of_sixteen_are_no_hit_and_ten_are(recheck):
  blocks = blocks_of((0, list(range(16))), (1, list(range(16, 32))))
  hits, missing = hits_and_missing(blocks, selection(range(9), range(16, 26)), recheck=recheck)
  assert hits == [1]
  assert missing == [list(range(9)), []]


@pytest.mark.parametrize("recheck", [False, True])
def test_nothing_selected(recheck):
  blocks = blocks_of((0, list(range(16))), (1, list(range(16))))
  assert hits_and_missing(blocks, selection([], []), recheck=recheck) == ([], [[], []])


def test_all_within_one_block():
  blocks = blocks_of((0, list(range(20, 36))), (1, list(range(16))))
  hits, missing = hits_and_missing(blocks, selection(range(22, 34), [3]))
  assert hits == [0]
  assert missing == [[], [3]]


def test_blocks_of_other_lists_do_not_serve():
  blocks = blocks_of((1, list(range(16))))
  assert hits_and_missing(blocks, selection(range(16), []))[0] == []


def test_overlapping_blocks_count_a_token_once_only_with_recheck():
  # Block 0 has 12 of S, block 1 ten, of which block 0 has four: six are left, under theta.
  blocks = blocks_of((0, list(range(12))), (0, list(range(8, 18))))
  selected = selection(range(18), [])
  assert hits_and_missing(blocks, selected, recheck=False) == ([0, 1], [[], []])
  assert hits_and_missing(blocks, selected, recheck=True) == ([0], [list(range(12, 18)), []])


def test_larger_counts_come_first_and_then_smaller_ids():
  # Block 1 has 14; blocks 0 and 2 both have ten of the other tokens, six in common.
  blocks = blocks_of(
    (0, list(range(14, 24))), (0, list(range(14))), (0, [*range(18, 24), *range(30, 34)])
  )
  selected = selection(range(40), [])
  hits, missing = hits_and_missing(blocks, selected)
  assert hits == [0, 1]
  assert missing[0] == list(range(24, 40))


def test_a_rejected_block_claims_nothing():
  # 1 is rejected because of 0, and 2, which shares its tokens with 1 alone, is not.
  blocks = blocks_of(
    (0, list(range(16))), (0, [*range(8), *range(16, 23)]), (0, [*range(16, 23), *range(30, 35)])
  )
  hits, missing = hits_and_missing(blocks, selection([*range(23), *range(30, 35)], []))
  assert hits == [0, 2]
  assert missing == [[], []]


def test_a_chain_of_blocks_is_settled_one_after_the_other():
  # 1 falls to 0, so that 2 keeps what it shares with 1; 2 then takes four of the eleven of 3.
  blocks = blocks_of(
    (0, list(range(16))),
    (0, [*range(8), *range(16, 23)]),
    (0, [*range(16, 23), *range(30, 35)]),
    (0, [*range(30, 34), *range(40, 47)]),
  )
  wanted = [*range(23), *range(30, 35), *range(40, 47)]
  hits, missing = hits_and_missing(blocks, selection(wanted, []))
  assert hits == [0, 2]
  assert missing[0] == list(range(40, 47))


def test_a_token_is_first_in_one_slot():
  blocks = blocks_of((0, list(range(12))), (0, list(range(2, 16))))
  found = retrieve(blocks, selection(range(16), []), theta=10, recheck=False, width=9)
  first = np.asarray(found.first)
  assert np.asarray(blocks.tokens)[0][first[0]].tolist() == [0, 1]  # block 1 has more, so it leads
  assert np.asarray(blocks.tokens)[1][first[1]].tolist() == list(range(2, 16))


def test_theta_rises_until_hits_and_new_blocks_fit():
  # With both as hits six of S are missing, which need a third block. With 11 as theta block 1 is
  # the only hit, and the missing 16 need one block.
  held = (0, list(range(10))), (0, list(range(16, 32)))
  selected = selection(range(32), [])
  assert hits_and_missing(blocks_of(*held), selected)[0] == [0, 1]
  assert hits_and_missing(blocks_of(*held), selected, width=2)[0] == [1]
  assert hits_and_missing(blocks_of(*held, spare=0), selected)[0] == [1]
  less = (0, list(range(10))), (0, list(range(16, 31)))  # 17 missing would need two
  assert hits_and_missing(blocks_of(*less, spare=0), selected)[0] == []


def random_case(seed: int):
  """Overlapping blocks of two lists, some of them short, and a selection."""
  rng = np.random.default_rng(seed)
  held = [
    (int(rng.integers(-1, 2)), rng.choice(24, rng.integers(1, 5), replace=False).tolist())
    for _ in range(14)
  ]
  held = [(x, tokens if x >= 0 else []) for x, tokens in held]
  return held, [set(rng.choice(24, 14, replace=False).tolist()) for _ in range(2)]


@pytest.mark.parametrize("recheck", [False, True])
@pytest.mark.parametrize("theta", [2, 3])
def test_random_blocks_as_by_hand(recheck, theta):
  contested = 0
  for seed in range(60):
    held, wanted = random_case(seed)
    blocks, selected = blocks_of(*held, page_size=4, spare=0), selection(*wanted)
    settings = Settings(width=14, heads=1, rho=theta / 4, recheck=recheck, eviction="fifo")
    pool = Pool(14, 4, 2, settings)
    pool.tokens = np.asarray(blocks.tokens).tolist()
    pool.owner = np.asarray(blocks.owner).tolist()
    by_hand = pool._retrieve(wanted)
    hits, missing = hits_and_missing(blocks, selected, theta, recheck, 14)
    assert hits == sorted(by_hand[0][0] + by_hand[1][0])
    assert missing == [sorted(left) for _, left in by_hand]
    literal = hits_and_missing(blocks, selected, theta, False, 14)[0]
    contested += hits != literal
  assert contested > 10 if recheck else contested == 0


def test_counting():
  rng = np.random.default_rng(3)
  for size in (1, 63, 64, 65, 1000):
    mask = rng.random(size) < 0.4
    assert np.array_equal(running(jnp.asarray(mask)), np.cumsum(mask))
    found = np.asarray(places(jnp.asarray(mask), size))
    assert found[: mask.sum()].tolist() == np.flatnonzero(mask).tolist()
    assert (found[mask.sum() :] == size).all()
    keys = rng.integers(0, 30, size).astype(np.int32)
    for count in (0, 1, size // 3, size):
      chosen = np.asarray(smallest(jnp.asarray(keys), jnp.asarray(mask), jnp.int32(count), bits=5))
      want = [i for _, i in sorted((keys[i], i) for i in np.flatnonzero(mask))][:count]
      assert np.flatnonzero(chosen).tolist() == sorted(want)
