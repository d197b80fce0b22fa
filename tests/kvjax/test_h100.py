"""The decode step of Llama-3.1-8B's shape, compiled for an H100: in place, no big copies."""

from __future__ import annotations

import dataclasses

import pytest

from kvjax import make_policy
from tests import aot
from tests.h100_report import LLAMA_8B, beside, compile_step, flexicache, runner_of, schedule

MIB = 1 << 20
BATCH, TOKENS = 4, 32_768


@pytest.mark.slow
@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.skipif(aot.why_not() is not None, reason=str(aot.why_not()))
@pytest.mark.parametrize("name", ["quest", "dense"])
def test_decode_step_of_an_8b_model_copies_no_pool(name):
  policy = make_policy(name, budget_tokens=64 * 16, page_size=16)
  step = compile_step(runner_of(policy, "resident", LLAMA_8B, BATCH, TOKENS))
  calls = 0 if name == "dense" else LLAMA_8B.num_layers - 2  # Quest's first two layers are dense
  memory, kept = step.memory, step.runner.decode_bytes.total
  copies = aot.big_copies(step.hlo, 64 * MIB)
  print(
    f"{name}: cache {kept} bytes, aliased {memory.alias_size_in_bytes}, "
    f"temporaries {memory.temp_size_in_bytes}, copies {copies}"
  )
  assert kept > 15e9
  assert memory.alias_size_in_bytes >= kept
  assert memory.temp_size_in_bytes < kept // 100
  assert not copies
  assert step.hlo.count('custom_call_target="mosaic_gpu') == calls  # their attention


@pytest.mark.slow
@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.skipif(aot.why_not() is not None, reason=str(aot.why_not()))
@pytest.mark.parametrize(
  "store", ["whole_page", "op_block", "op_block:host_blocks=1.0", "head_tiered"]
)
def test_decode_step_with_a_host_tier_copies_no_pool(store):
  """Four layers: InfiniGen with a quarter of the tokens, of which two select, or FlexiCache."""
  shape = dataclasses.replace(LLAMA_8B, num_layers=4)
  if store == "head_tiered":
    runner = flexicache(1024, shape, BATCH, TOKENS)
  else:
    policy = make_policy("infinigen", budget_tokens=TOKENS // 4, page_size=16)
    runner = runner_of(policy, store, shape, BATCH, TOKENS)
  step = compile_step(runner)
  memory, kept, hlo = step.memory, step.runner.decode_bytes, step.hlo
  print(
    f"{store}: {kept}, aliased {memory.alias_size_in_bytes} and on the host "
    f"{memory.host_alias_size_in_bytes}, temporaries {memory.temp_size_in_bytes} and on the host "
    f"{memory.host_temp_size_in_bytes}"
  )
  assert kept.host > 1e9
  assert memory.host_alias_size_in_bytes == kept.host
  assert memory.host_temp_size_in_bytes == 0
  assert memory.alias_size_in_bytes >= kept.total
  assert not aot.big_copies(hlo, 16 * MIB)
  # A recall of keys and one of values for each selecting layer, and of blocks that come back; where
  # pages or blocks are read, the attention to them.
  launched = schedule(hlo)
  layers = shape.num_layers if store == "head_tiered" else 2
  recalls = (4 if "host_blocks" in store else 2) * layers
  assert launched.count("recall") == launched.count("recalled") == recalls
  assert launched.count("attention") == (0 if store == "whole_page" else layers)
  print(f"{store}: launches beside each recall {beside(launched)}")
  assert min(beside(launched)) > 0
  if (
    store == "op_block"
  ):  # InfiniGen knows a layer ahead what it wants; that one computes meanwhile
    assert max(beside(launched)) > 20
