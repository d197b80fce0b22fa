"""Runs a model with a policy on a store."""

from kvjax.engine.batching import JaxBackend
from kvjax.engine.clock import VirtualClock, WallClock
from kvjax.engine.generate import Generation, generate
from kvjax.engine.padding import unpad
from kvjax.engine.placing import STORES
from kvjax.engine.preparing import Runner, prepare
from kvjax.engine.requests import Finished, Outcome, Request
from kvjax.engine.sampling import Sampling
from kvjax.engine.serving import Server, serve
from kvjax.engine.sharded import make_mesh, param_shardings
from kvjax.engine.steps import decode_step, selected_pages

__all__ = [
  "STORES",
  "Finished",
  "Generation",
  "JaxBackend",
  "Outcome",
  "Request",
  "Runner",
  "Sampling",
  "Server",
  "VirtualClock",
  "WallClock",
  "decode_step",
  "generate",
  "make_mesh",
  "param_shardings",
  "prepare",
  "selected_pages",
  "serve",
  "unpad",
]
