"""The decode step of Llama-3.1-8B's shape, compiled for an H100: in place, no big copies."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from kvjax import CacheConfig, ModelConfig, make_policy, prepare
from kvjax.engine import steps
from models import build, param_shapes
from tests import aot

MIB = 1 << 20
LLAMA_8B = ModelConfig(
  family="llama",
  num_layers=32,
  num_heads=32,
  num_kv_heads=8,
  head_dim=128,
  embed_dim=4096,
  ffn_dim=14336,
  vocab_size=128_256,
  max_tokens=131_072,
  rope_theta=500_000.0,
)
BATCH, TOKENS = 4, 32_768


@pytest.mark.slow
@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.skipif(aot.why_not() is not None, reason=str(aot.why_not()))
@pytest.mark.parametrize("name", ["quest", "dense"])
def test_decode_step_of_an_8b_model_copies_no_pool(name):
  policy = make_policy(name, budget_tokens=64 * 16, page_size=16)
  config = CacheConfig(BATCH, TOKENS, dtype="bfloat16", base_tokens=TOKENS)
  model = build(LLAMA_8B)
  runner = prepare(model, policy, "resident", config)
  args = (
    runner,
    param_shapes(LLAMA_8B, "bfloat16"),
    jax.eval_shape(lambda: steps.empty_cache(runner)),
    jax.ShapeDtypeStruct((BATCH,), "int32"),
  )
  calls = 0 if name == "dense" else LLAMA_8B.num_layers - 2  # Quest's first two layers are dense
  compiled = aot.compile_for_h100(
    steps.decode_step.__wrapped__, *args, static_argnums=(0,), donate_argnums=(2,)
  )
  memory, kept = compiled.memory_analysis(), runner.decode_bytes.total
  copies = aot.big_copies(compiled.as_text(), 64 * MIB)
  print(
    f"{name}: cache {kept} bytes, aliased {memory.alias_size_in_bytes}, "
    f"temporaries {memory.temp_size_in_bytes}, copies {copies}"
  )
  assert kept > 15e9
  assert memory.alias_size_in_bytes >= kept
  assert memory.temp_size_in_bytes < kept // 100
  assert not copies
  assert compiled.as_text().count('custom_call_target="mosaic_gpu') == calls  # their attention


@pytest.mark.slow
@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.skipif(aot.why_not() is not None, reason=str(aot.why_not()))
@pytest.mark.parametrize("store", ["whole_page", "op_block"])
def test_decode_step_with_a_host_tier_copies_no_pool(store):
  """InfiniGen with a quarter of the tokens, four layers of which two select."""
  policy = make_policy("infinigen", budget_tokens=TOKENS // 4, page_size=16)
  config = CacheConfig(BATCH, TOKENS, dtype="bfloat16", base_tokens=TOKENS)
  shape = dataclasses.replace(LLAMA_8B, num_layers=4)
  runner = prepare(build(shape), policy, store, config)
  prefilled = jax.eval_shape(lambda: steps.empty_cache(runner))
  rest = prefilled.replace(host=None, pools=None)
  sealed = jax.eval_shape(
    lambda rest, pools: steps.stow(runner, rest, pools), rest, prefilled.pools
  )
  cache = sealed.replace(host=prefilled.host)
  args = runner, param_shapes(shape, "bfloat16"), cache, jax.ShapeDtypeStruct((BATCH,), "int32")
  compiled = aot.compile_for_h100(
    steps.decode_step.__wrapped__, *args, static_argnums=(0,), donate_argnums=(2,)
  )
  memory, kept, hlo = compiled.memory_analysis(), runner.decode_bytes, compiled.as_text()
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
  # A recall for each selecting layer, and where whole blocks are read their attention.
  assert hlo.count('custom_call_target="mosaic_gpu') == (2 if store == "whole_page" else 4)
