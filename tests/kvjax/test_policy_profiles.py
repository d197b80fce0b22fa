"""The option `profile` of the policies that take one: what it does, and whose it may be."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from kvjax import CacheConfig, make_policy, prepare
from kvjax.policies.duo import retrieval_heads
from kvjax.profiling import (
  Profile,
  check_model,
  duo_gates,
  filter_layers,
  load_heads,
  load_profile,
  save_profile,
  skewing,
)
from kvjax.types import DENSE, SELECT
from models import build
from models.fetch import SMOLLM2
from models.loading import SMOLLM2_NAME, files_hash
from tests.kvjax import matrix

ROOT = Path(__file__).resolve().parents[2]
LAYERS, K, D = 4, 2, 16
MODEL, PARAMS = matrix.known_model(matrix.Shape(K, 4, D), LAYERS)
HASH = MODEL.config.content_hash
UNKNOWN = matrix.tiny_model(matrix.Shape(K, 4, D), LAYERS)[0]
OTHER = build(dataclasses.replace(MODEL.config, content_hash="cd" * 32))
GATES = np.random.default_rng(3).random((LAYERS, K)).astype(np.float32)
CASES = {
  "infinigen": (skewing.METHOD, {"skew": np.zeros((LAYERS, K, D, D), np.float32)}),
  "omnikv": (filter_layers.METHOD, {"mass": np.eye(LAYERS), "filters": np.array([1], np.int32)}),
  "duo": (duo_gates.METHOD, {"gates": GATES}),
}
every_policy = pytest.mark.parametrize("policy", CASES)


def _profile(policy):
  method, arrays = CASES[policy]
  return Profile(method, "tiny", HASH, {"seed": 0}, arrays)


def _prepare(model, policy):
  return prepare(model, policy, policy.stores[0], CacheConfig(1, 400))


@every_policy
def test_a_profile_and_its_path_are_the_same(policy, tmp_path):
  path = tmp_path / "one.npz"
  save_profile(path, _profile(policy))
  runners = [
    _prepare(MODEL, made)
    for made in (
      make_policy(policy, profile=_profile(policy)),
      make_policy(policy, profile=path),
      make_policy(policy, profile=str(path)),
      make_policy(f"{policy}:profile={path}"),
    )
  ]
  assert len({runner.plan for runner in runners}) == 1
  assert len({runner.decode_bytes for runner in runners}) == 1


def test_omnikv_takes_the_layers_of_its_profile():
  plan = _prepare(MODEL, make_policy("omnikv", profile=_profile("omnikv"), wait_layers=0)).plan
  assert plan.roles == (DENSE, DENSE, SELECT, SELECT) and plan.watched == (1,)


def test_duo_takes_the_heads_with_the_highest_gates():
  for sparsity, full in ((0.0, 8), (0.25, 6), (0.5, 4), (1.0, 0)):
    policy = make_policy("duo", profile=_profile("duo"), sparsity=sparsity)
    assert policy.keeps is not None and policy.joins_heads == (full > 0)
    kept = np.array([policy.keeps(row, LAYERS, K, 400) for row in range(LAYERS)])
    assert (kept == 400).sum() == full and (kept == 320).sum() == 8 - full
    chosen = {(int(row), int(head)) for row, head in np.argwhere(kept == 400)}
    assert chosen == set(retrieval_heads(GATES, sparsity))
    assert not full or GATES[kept == 400].min() >= GATES[kept < 400].max(initial=0)
  with pytest.raises(ValueError, match=r"policy 'duo': sparsity 1.5 must be between 0 and 1"):
    make_policy("duo", profile=_profile("duo"), sparsity=1.5)


@every_policy
def test_a_profile_of_other_weights_is_refused(policy):
  made = make_policy(policy, profile=_profile(policy))
  _refused(lambda: _prepare(OTHER, made), rf"policy '{policy}': the profile is one of tiny with sh")
  _refused(lambda: _prepare(OTHER, made), "sha256 abababababababab, and the model has cdcdcdcdcdcd")
  _refused(
    lambda: _prepare(UNKNOWN, made),
    rf"policy '{policy}': the profile is one of tiny, and the weights of this model are unknown",
  )
  _prepare(UNKNOWN, make_policy(policy))  # which needs no profile


@every_policy
def test_a_profile_of_another_method_is_refused(policy, tmp_path):
  method = CASES[policy][0]
  for other in set(CASES) - {policy}:
    profile = _profile(other)
    _refused(
      lambda profile=profile: make_policy(policy, profile=profile),
      f"policy '{policy}' takes a profile of {method}, and this one is of {profile.method}",
    )
    path = tmp_path / f"{other}.npz"
    save_profile(path, profile)
    _refused(
      lambda path=path: make_policy(policy, profile=path),
      f"policy '{policy}', option profile: .*{other}.npz is a profile of {profile.method}, exp",
    )


@every_policy
def test_what_is_no_profile_is_refused(policy, tmp_path):
  path = tmp_path / "text.npz"
  path.write_text("text")
  _refused(
    lambda: make_policy(policy, profile=path),
    f"policy '{policy}', option profile: .*text.npz is no profile",
  )
  _refused(
    lambda: make_policy(f"{policy}:profile=none.npz"),
    f"policy '{policy}', option profile: none.npz is not a file",
  )


def test_a_profile_or_what_it_says_but_not_both():
  _refused(
    lambda: make_policy("omnikv", profile=_profile("omnikv"), filter_layers=(1,)),
    "policy 'omnikv' takes a profile or filter_layers, not both",
  )
  _refused(
    lambda: make_policy("duo", profile=_profile("duo"), full_heads=((0, 1),)),
    "policy 'duo' takes a profile or full_heads, not both",
  )


def test_the_kept_profiles():
  """Each is of the very model, and of the method, that its name says."""
  policies = {method: policy for policy, (method, _) in CASES.items()}
  small = {name: ROOT / "models" / "small" / name for name in ("small-llama", "small-opt")}
  hashes = {name: files_hash([folder / "model.safetensors"]) for name, folder in small.items()}
  hashes[SMOLLM2_NAME] = SMOLLM2.sha256
  methods = (duo_gates.METHOD, filter_layers.METHOD)
  names = sorted(path.stem for path in (ROOT / "profiles").glob("*.npz"))
  assert names == [f"{model}-{method}" for model in hashes for method in methods]
  for name in names:
    model, _, method = name.rpartition("-")
    profile = load_profile(ROOT / "profiles" / f"{name}.npz", method)
    check_model(profile, hashes[model])
    assert profile.model == model
    make_policy(policies[method], profile=profile)
  heads = {path.stem.rpartition("-heads-")[::2] for path in (ROOT / "profiles").glob("*.json")}
  assert heads == {
    *((name, pages) for name in small for pages in ("8", "16")),
    *((SMOLLM2_NAME, pages) for pages in ("64", "128")),
  }
  for name, pages in heads:
    profile = load_heads(ROOT / "profiles" / f"{name}-heads-{pages}.json", int(pages), 16)
    check_model(profile, hashes[name])
    unstable, scores = profile.arrays["unstable_heads"], profile.arrays["instability"]
    assert profile.model == name and len(unstable) == round(scores.size / 4)
    mask = np.zeros(scores.shape, bool)
    mask[tuple(unstable.T)] = True
    least = 0.08 if name == "small-opt" else 0.1  # whose heads differ less
    assert scores[mask].mean() > scores[~mask].mean() + least


def _refused(call, message):
  with pytest.raises(ValueError, match=message) as caught:
    call()
  assert "\n" not in str(caught.value)
