"""Checks that fail in every way there is, and one between them that does not."""

from __future__ import annotations

import os
import time

import jax.numpy as jnp

from scripts.gpu_checks.case import Case, LeftOut

SECONDS = 60


def cases(setting):
  yield Case("raises", _raise)
  yield Case("is wrong", lambda: {"ok": False, "max_error": float("inf")})
  yield Case("ends the process", lambda: os._exit(7))
  yield Case("is right", lambda: {"ok": bool(jnp.ones(3).sum() == 3), "seconds": 1e-5})
  yield Case("never ends", lambda: time.sleep(3600))
  yield Case("is left out", _leave_out)
  yield Case("prints", lambda: print("to stdout") or {})


def _raise():
  raise RuntimeError("two\nlines")


def _leave_out():
  raise LeftOut("not here")
