"""Which implementation is chosen, why not another, and what is recorded."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import dispatch

ALL = {"xla": None, "mosaic": None, "triton": None}
REFUSED = {"xla": None, "mosaic": "head size 40 is no multiple of 16"}


def _gpu(kind):
  device = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
  return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


def test_what_is_chosen_for_a_target():
  assert dispatch.choose("op", None, ALL) == "xla"  # the tests run on a CPU
  for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"):
    with _gpu(kind):
      assert dispatch.choose("op", None, ALL) == "mosaic"
      assert dispatch.choose("op", None, REFUSED) == "xla"
      assert dispatch.choose("op", None, {"xla": None}) == "xla"
      assert dispatch.choose("op", "triton", ALL) == "triton"
  with _gpu("NVIDIA A100-SXM4-80GB"):
    assert dispatch.choose("op", None, ALL) == "xla"


@pytest.mark.parametrize(
  ("capability", "chosen"), [("9.0", "mosaic"), ("10.0", "mosaic"), ("8.0", "xla"), ("gfx9", "xla")]
)
def test_the_default_device_says_its_own_capability(capability, chosen, monkeypatch):
  device = SimpleNamespace(platform="gpu", device_kind="a GPU", compute_capability=capability)
  monkeypatch.setattr(jax, "devices", lambda: [device])
  assert dispatch.choose("op", None, ALL) == chosen


def test_interpreting_asks_for_no_target():
  assert dispatch.choose("op", None, ALL, interpret=True) == "mosaic"
  assert dispatch.choose("op", "triton", ALL, interpret=True) == "triton"
  assert dispatch.choose("op", None, REFUSED, interpret=True) == "xla"


@pytest.mark.parametrize(
  ("name", "refusals", "message"),
  [
    ("mosaic", ALL, "op: implementation 'mosaic' cannot run: the target is no NVIDIA GPU .*; use "),
    ("mosaic", REFUSED, "cannot run: head size 40 is no multiple of 16; use .* one of xla$"),
    ("cuda", ALL, "'cuda' cannot run: there are only xla, mosaic, triton; use .* one of xla$"),
  ],
)
def test_a_named_one_that_cannot_run_is_refused(name, refusals, message):
  with pytest.raises(ValueError, match=message):
    dispatch.choose("op", name, refusals)


def test_triton_needs_a_newer_gpu(monkeypatch):
  device = SimpleNamespace(platform="gpu", device_kind="a GPU", compute_capability="7.5")
  monkeypatch.setattr(jax, "devices", lambda: [device])
  with pytest.raises(ValueError, match=r"capability 8\.0 or newer, and the target has 7\.5"):
    dispatch.choose("op", "triton", ALL)


def test_choices_are_recorded_while_they_are_traced():
  def step(x):
    dispatch.choose("a", None, ALL)
    dispatch.choose("b", None, ALL)
    dispatch.choose("b", "mosaic", ALL, interpret=True)
    dispatch.choose("b", None, ALL)
    return x

  with dispatch.recording() as chosen:
    jax.jit(step)(1.0)
  assert chosen == {"a": "xla", "b": "xla+mosaic"}
  dispatch.choose("c", None, ALL)
  assert "c" not in chosen
