"""Runs a model with a policy on a store."""

from kvjax.engine.generate import Generation, generate
from kvjax.engine.padding import unpad
from kvjax.engine.placing import STORES
from kvjax.engine.sampling import Sampling
from kvjax.engine.sharded import make_mesh, param_shardings
from kvjax.engine.steps import Runner, decode_step, prepare, selected_pages

__all__ = [
  "STORES",
  "Generation",
  "Runner",
  "Sampling",
  "decode_step",
  "generate",
  "make_mesh",
  "param_shardings",
  "prepare",
  "selected_pages",
  "unpad",
]
