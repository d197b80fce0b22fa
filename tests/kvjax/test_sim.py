"""The cost model against sums by hand, and what must grow when work does."""

from __future__ import annotations

import dataclasses

import pytest

from kvjax.config import ModelConfig
from kvjax.sim import MACHINES, Machine, costs, decode_step_s, machine, prefill_s, transfer_s
from models import abstract
from models.memory import params_bytes

# 2 layers of 4 query and 2 KV heads of 8: 16*(12*8 + 3*32) = 3,072 numbers each; head 16*100.
CONFIG = ModelConfig("llama", 2, 4, 2, 8, 16, 32, 100, 4096)
PLAIN = Machine(
  name="plain",
  source="by hand",
  product_flops_per_s=1e6,
  attention_flops_per_s=2e6,
  read_bytes_per_s=4e6,
  few_rows_bytes_per_s=1e6,
  link_bytes_per_s=1e5,
  host_bytes_per_s=1e6,
  disk_bytes_per_s=1e4,
  device_bytes=1e9,
  host_bytes=1e9,
  item_bytes=4,
  layer_s=0.01,
  transfer_s=0.5,
)


def test_a_prefill_by_hand():
  """10 tokens after 5: 2 (2 * 3,072 * 10 + 1,600) flops of products; 10 * 5 + 55 pairs."""
  products, attention = 2 * (2 * 3072 * 10 + 1600) / 1e6, 4 * 4 * 8 * 2 * 105 / 2e6
  expected = products + attention + 0.02
  assert prefill_s(CONFIG, PLAIN, 10, past_tokens=5) == pytest.approx(expected)
  both = 2 * (products + attention) + 0.02
  assert prefill_s(CONFIG, PLAIN, 10, past_tokens=5, batch_size=2) == pytest.approx(both)
  slow = PLAIN._replace(read_bytes_per_s=1e3)  # one token waits for the weights
  assert prefill_s(CONFIG, slow, 1) == pytest.approx(
    (2 * 3072 + 1600) * 4 / 1e3 + 4 * 4 * 8 * 2 / 2e6 + 0.02
  )


def test_a_decode_step_by_hand():
  """One row reads 7,744 numbers of weights at 4 MB/s, two rows at 1 MB/s; 256 bytes a token."""
  assert costs.kv_bytes(CONFIG, 1, 4) == 2 * 2 * 2 * 8 * 4 == 256
  one = max(2 * 7744 / 1e6, 7744 * 4 / 4e6) + 1000 * 256 / 1e6 + 0.02
  assert decode_step_s(CONFIG, PLAIN, [1000]) == pytest.approx(one)
  two = 7744 * 4 / 1e6 + 1100 * 256 / 1e6 + 0.02
  assert decode_step_s(CONFIG, PLAIN, [1000, 100]) == pytest.approx(two)
  ranked = costs.digest_bytes(CONFIG, 1000, 16, 4)
  assert ranked == 63 * 256
  assert decode_step_s(CONFIG, PLAIN, [1000], ranked_bytes=ranked) == pytest.approx(
    one + 63 * 256 / 1e6
  )
  slow = PLAIN._replace(attention_flops_per_s=1e3, product_flops_per_s=1e3)
  scores = 4 * 4 * 8 * 2 * 1000 / 1e3
  assert decode_step_s(CONFIG, slow, [1000]) == pytest.approx(2 * 7744 / 1e3 + scores + 0.02)


def test_a_transfer_by_hand():
  assert transfer_s(PLAIN, 2e5) == pytest.approx(0.5 + 2)
  assert transfer_s(PLAIN, 2e5, disk=True, parts=3) == pytest.approx(1.5 + 20)
  assert transfer_s(PLAIN, 0) == 0


@pytest.mark.parametrize("source", ["random:llama-3.1-8b", "random:smollm2-135m"])
def test_weights_are_those_of_the_model(source):
  """All but the norms, and the embedding where it is not the head too."""
  model, params = abstract(source)
  config = model.config
  counted = config.num_layers * costs.layer_numbers(config) + costs.head_numbers(config)
  if not config.tied_embeddings:
    counted += config.embed_dim * config.vocab_size
  norms = (2 * config.num_layers + 1) * config.embed_dim
  assert params_bytes(params) == 4 * (counted + norms)


def test_opt_has_two_matrices_in_its_feed_forward():
  opt = dataclasses.replace(CONFIG, family="opt")
  assert costs.layer_numbers(CONFIG) - costs.layer_numbers(opt) == 16 * 32


@pytest.mark.parametrize("name", MACHINES)
def test_more_work_never_takes_less_time(name):
  config, one = abstract("random:llama-3.1-8b")[0].config, machine(name)
  sizes = (1, 2, 100, 1000, 30_000, 120_000)
  grows = (
    [prefill_s(config, one, size) for size in sizes],
    [prefill_s(config, one, 64, past_tokens=size) for size in sizes],
    [decode_step_s(config, one, [size]) for size in sizes],
    [decode_step_s(config, one, [1024] * rows) for rows in range(1, 40)],
    [transfer_s(one, size) for size in sizes],
  )
  for times in grows:
    assert times == sorted(times) and times[0] > 0 and times[-1] > times[0]
  assert one.source and min(one[2:]) > 0


def test_flexicache_on_the_machine_of_its_paper():
  """Between what reading alone says (a quarter whole, the rest 1,024 tokens) and no gain."""
  config, one = abstract("random:llama-3.1-8b")[0].config, machine("h100-nvl")
  rows, tokens, budget = 40, 20_000, 1024
  dense = decode_step_s(config, one, [tokens] * rows)
  ranked = rows * costs.digest_bytes(config, tokens, 16, 2) * (0.25 + 0.75 / 16)
  sparse = decode_step_s(config, one, [budget] * rows, ranked_bytes=ranked)
  assert 2 < dense / sparse < tokens / budget


def test_an_unknown_machine():
  with pytest.raises(ValueError, match="unknown machine 'tpu'; expected one of h100-sxm, "):
    machine("tpu")
