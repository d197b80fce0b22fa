"""Folders of safetensors: what is read is what was written, and bad ones say what is wrong."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models import checkpoint, safetensors_reader
from scripts import golden_models
from tests.models import tiny


def _equal(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def _check_params(params, weights, config):
  """Every tensor is where it belongs, to the bit, turned to [in, out]."""
  np.testing.assert_array_equal(params["embed"], weights["model.embed_tokens.weight"])
  if not config.tied_embeddings:
    np.testing.assert_array_equal(params["head"], weights["lm_head.weight"])
  np.testing.assert_array_equal(params["norm"], weights["model.norm.weight"])
  assert len(params["layers"]) == config.num_layers
  for index, layer in enumerate(params["layers"]):
    prefix = f"model.layers.{index}."
    for key, name in (
      ("attn_norm", "input_layernorm"),
      ("q", "self_attn.q_proj"),
      ("k", "self_attn.k_proj"),
      ("v", "self_attn.v_proj"),
      ("o", "self_attn.o_proj"),
      ("mlp_norm", "post_attention_layernorm"),
      ("gate", "mlp.gate_proj"),
      ("up", "mlp.up_proj"),
      ("down", "mlp.down_proj"),
    ):
      np.testing.assert_array_equal(layer[key], weights[f"{prefix}{name}.weight"].T, err_msg=key)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("config", [tiny.CONFIG, tiny.tied()], ids=["untied", "tied"])
def test_single_and_sharded(tmp_path, config, shards):
  weights = tiny.tensors(config)
  loaded = models.load(str(tiny.write_folder(tmp_path / "model", config, weights, shards)))
  assert loaded.model.config == config
  assert loaded.name == "model" and loaded.tokenizer is None
  _check_params(loaded.params, weights, config)


def test_bf16_round_trip(tmp_path):
  weights = tiny.tensors(dtype=ml_dtypes.bfloat16)
  folder = tiny.write_folder(tmp_path / "model", tiny.CONFIG, weights)
  exact = models.load(str(folder), "bfloat16").params
  assert exact["embed"].dtype == jnp.bfloat16
  _check_params(exact, weights, tiny.CONFIG)
  widened = models.load(str(folder), "float32").params
  _equal(jax.tree.map(lambda x: x.astype(jnp.bfloat16), widened), exact)


def test_f16_and_f32_to_another_dtype(tmp_path):
  weights = tiny.tensors(dtype="float16")
  folder = tiny.write_folder(tmp_path / "half", tiny.CONFIG, weights)
  _check_params(models.load(str(folder)).params, weights, tiny.CONFIG)
  folder = tiny.write_folder(tmp_path / "single", tiny.CONFIG, tiny.tensors())
  _check_params(models.load(str(folder), "float16").params, weights, tiny.CONFIG)


def test_parameters_outlive_the_file(tmp_path):
  folder = tiny.write_folder(tmp_path / "model", tiny.CONFIG, tiny.tensors())
  params = models.load(str(folder)).params
  size = (folder / "model.safetensors").stat().st_size
  (folder / "model.safetensors").write_bytes(bytes(size))
  _check_params(params, tiny.tensors(), tiny.CONFIG)


def test_content_hash_follows_the_weights(tmp_path):
  weights = tiny.tensors()
  one = models.load(str(tiny.write_folder(tmp_path / "a", tiny.CONFIG, weights, 2))).content_hash
  same = models.load(str(tiny.write_folder(tmp_path / "b", tiny.CONFIG, weights, 2))).content_hash
  weights["model.norm.weight"] = weights["model.norm.weight"] + 1
  other = models.load(str(tiny.write_folder(tmp_path / "c", tiny.CONFIG, weights, 2))).content_hash
  assert one == same != other and len(one) == 64


def test_ignores_a_stored_copy_of_a_tied_head_and_rotary_frequencies(tmp_path):
  weights = tiny.tensors(tiny.tied())
  weights["lm_head.weight"] = np.zeros((300, 64), np.float32)
  weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
  loaded = models.load(str(tiny.write_folder(tmp_path / "model", tiny.tied(), weights)))
  assert "head" not in loaded.params


def test_newer_rope_parameters(tmp_path):
  folder = tiny.write_folder(
    tmp_path / "model",
    tiny.CONFIG,
    tiny.tensors(),
    rope_theta=None,
    rope_parameters={"rope_type": "default", "rope_theta": 7.0},
  )
  assert models.load(str(folder)).model.config == dataclasses.replace(tiny.CONFIG, rope_theta=7.0)


def test_all_bad_tensors_are_listed_at_once(tmp_path):
  weights = tiny.tensors()
  del weights["model.norm.weight"], weights["model.layers.1.mlp.up_proj.weight"]
  weights["lm_head.weight"] = np.zeros((299, 64), np.float32)
  weights["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
  folder = tiny.write_folder(tmp_path / "model", tiny.CONFIG, weights)
  with pytest.raises(ValueError) as error:
    models.load(str(folder))
  message = str(error.value)
  assert "\n" not in message and str(folder) in message
  assert "2 missing tensors: model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
  assert "1 unexpected tensors: model.layers.0.self_attn.q_proj.bias" in message
  assert "lm_head.weight has shape [299, 64], expected [300, 64]" in message


@pytest.mark.parametrize("case", ["qwen2", "opt", "opt-350m"])
def test_bad_tensors_of_other_families(tmp_path, case):
  folder = tmp_path / "model"
  golden_models.write(folder, golden_models.CASES[case], 0)
  weights = load_file(folder / "model.safetensors")
  lost = [name for name in weights if name.endswith(("layers.1.self_attn.k_proj.bias", "fc2.bias"))]
  for name in lost:
    del weights[name]
  turned = next(
    name
    for name in weights
    if name.endswith(("project_in.weight", "0.fc1.weight")) or name.endswith("0.mlp.up_proj.weight")
  )
  weights[turned] = np.ascontiguousarray(weights[turned].T)
  weights["model.extra.weight"] = np.zeros(3, np.float32)
  save_file(weights, folder / "model.safetensors")
  with pytest.raises(ValueError) as error:
    models.load(str(folder))
  message = str(error.value)
  assert f"{len(lost)} missing tensors: {', '.join(sorted(lost))}" in message
  assert "1 unexpected tensors: model.extra.weight" in message
  assert f"1 tensors of the wrong shape: {turned} has shape" in message


def test_older_files_of_opt_without_the_first_part_of_names(tmp_path):
  newer, older = tmp_path / "newer", tmp_path / "older"
  for folder in (newer, older):
    golden_models.write(folder, golden_models.CASES["opt"], 0)
  weights = load_file(older / "model.safetensors")
  weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
  weights["lm_head.weight"] = weights["decoder.embed_tokens.weight"]
  save_file(weights, older / "model.safetensors")
  _equal(models.load(str(older)).params, models.load(str(newer)).params)
  del weights["decoder.layers.0.fc1.bias"]
  save_file(weights, older / "model.safetensors")
  with pytest.raises(ValueError, match=r"1 missing tensors: decoder\.layers\.0\.fc1\.bias; get"):
    models.load(str(older))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_not_finite(tmp_path, dtype):
  weights = tiny.tensors(dtype=ml_dtypes.bfloat16)
  weights["model.layers.1.mlp.down_proj.weight"][5, 7:10] = np.nan, np.inf, -np.inf
  folder = tiny.write_folder(tmp_path / "model", tiny.CONFIG, weights)
  with pytest.raises(
    ValueError,
    match=rf"^{folder}: tensor model\.layers\.1\.mlp\.down_proj\."
    rf"weight holds 3 numbers that are not finite in {dtype}, of 6144; get the",
  ):
    models.load(str(folder), dtype)


def test_weights_that_a_narrower_dtype_cannot_hold(tmp_path):
  weights = tiny.tensors()
  weights["model.norm.weight"][3] = 1e6
  folder = tiny.write_folder(tmp_path / "model", tiny.CONFIG, weights)
  models.load(str(folder), "bfloat16")
  with pytest.raises(ValueError, match="holds 1 numbers that are not finite in float16"):
    models.load(str(folder), "float16")


def test_the_check_for_finite_numbers_needs_no_copy():
  tensor = np.ones((1 << 22,), np.float32)
  tensor[::1000] = np.nan
  tracemalloc.start()
  assert checkpoint._count_not_finite(tensor) == 4195
  assert tracemalloc.get_traced_memory()[1] < tensor.nbytes / 4
  tracemalloc.stop()


@pytest.mark.parametrize(
  ("changes", "expected"),
  [
    ({"num_hidden_layers": "two"}, "num_layers is 'two', expected a positive whole number"),
    ({"num_hidden_layers": -1}, "num_layers is -1"),
    ({"num_attention_heads": 0}, "num_heads is 0"),
    ({"hidden_size": None}, "embed_dim is None"),
    ({"num_key_value_heads": 3}, "num_kv_heads is 3, expected a divisor of 4 heads"),
    ({"head_dim": 15}, "head_dim is 15, expected a positive even number"),
    ({"rope_theta": "big"}, "rope_theta is 'big', expected a positive number"),
    ({"rms_norm_eps": None}, "norm_eps is None"),
  ],
)
def test_values_that_make_no_sense(tmp_path, changes, expected):
  folder = tiny.write_folder(tmp_path / "model", tiny.CONFIG, tiny.tensors(), **changes)
  with pytest.raises(ValueError, match=rf"config\.json: {expected}"):
    models.load(str(folder))


def test_missing_shards_are_listed(tmp_path):
  folder = tiny.write_folder(tmp_path / "model", tiny.CONFIG, tiny.tensors(), 3)
  (folder / "model-00001-of-00003.safetensors").unlink()
  (folder / "model-00003-of-00003.safetensors").unlink()
  with pytest.raises(ValueError, match=r"2 of 3 shards .* model-00001-of-.*, model-00003-of-"):
    models.load(str(folder))


def test_shards_that_the_index_does_not_name(tmp_path):
  folder = tiny.write_folder(tmp_path / "model", tiny.CONFIG, tiny.tensors(), 3)
  index = folder / "model.safetensors.index.json"
  names = json.loads(index.read_text())["weight_map"]
  names = {name: file for name, file in names.items() if "00002-of" not in file}
  tiny.write_json(index, {"weight_map": names})
  with pytest.raises(ValueError, match=r"does not name model-00002-of-00003.safetensors beside it"):
    models.load(str(folder))
  (folder / "model-00002-of-00003.safetensors").unlink()
  with pytest.raises(ValueError, match=r"\d+ missing tensors: "):
    models.load(str(folder))


def test_truncated_file(tmp_path):
  folder = tiny.write_folder(tmp_path / "model", tiny.CONFIG, tiny.tensors())
  file = folder / "model.safetensors"
  file.write_bytes(file.read_bytes()[:-100])
  with pytest.raises(ValueError, match=r"model\.safetensors is a truncated or damaged"):
    models.load(str(folder))


def test_dtypes_that_are_not_supported(tmp_path):
  weights = tiny.tensors() | {"model.norm.weight": np.zeros(64, np.int8)}
  folder = tiny.write_folder(tmp_path / "model", tiny.CONFIG, weights)
  with pytest.raises(ValueError, match=r"not supported: model\.norm\.weight \(I8\)"):
    models.load(str(folder))


def test_incomplete_folders(tmp_path):
  with pytest.raises(ValueError, match=r"config\.json is missing"):
    models.load(str(tmp_path))
  folder = tiny.write_folder(tmp_path / "model", tiny.CONFIG, tiny.tensors())
  (folder / "model.safetensors").unlink()
  with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
    models.load(str(folder))
  tiny.write_json(folder / "model.safetensors.index.json", {})
  with pytest.raises(ValueError, match="no weight_map"):
    models.load(str(folder))
  tiny.write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": 3}})
  with pytest.raises(ValueError, match="other things than file names"):
    models.load(str(folder))
  tiny.write_json(folder / "config.json", {"model_type": "llama"})
  with pytest.raises(ValueError, match="lacks num_hidden_layers, num_attention_heads"):
    models.load(str(folder))
  (folder / "config.json").write_text("{")
  with pytest.raises(ValueError, match="is not JSON"):
    models.load(str(folder))
  tiny.write_json(folder / "config.json", [])
  with pytest.raises(ValueError, match="holds a JSON list"):
    safetensors_reader.read_json(folder / "config.json")
