"""The option `profile` of policies that must know something of a model before it runs.

measured = _profile.read("omnikv", profile, "filter_layers", filter_layers=filter_layers)
...
def register(model, cache):
  _profile.check("omnikv", measured, model)
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from pathlib import Path

from kvjax.config import ModelConfig
from kvjax.profiling.head_stability import METHOD
from kvjax.profiling.profile import Profile, check_model, load_profile
from kvjax.profiling.unstable_heads import check_heads

Source = str | Path | Profile | None


def read(
  policy: str,
  profile: Source,
  method: str,
  load: Callable[[str | Path], Profile] | None = None,
  **instead: Sized | None,
) -> Profile | None:
  """What the option stands for; None where it was not given.

  Args:
    policy: its name.
    profile: a profile, or the path of one.
    method: what it must be a profile of.
    load: reads a path; None for `load_profile`.
    **instead: options by name that say the same, None or empty where they were not given.

  Raises:
    ValueError: the file is missing or no profile, it is one of another method, or one of the
      options instead was given too.
  """
  if profile is None:
    return None
  for option, value in instead.items():
    if value is not None and len(value):
      raise ValueError(f"policy {policy!r} takes a profile or {option}, not both; leave one out")
  if not isinstance(profile, Profile):
    try:
      return load(profile) if load else load_profile(profile, method)
    except ValueError as error:
      raise ValueError(f"policy {policy!r}, option profile: {error}") from error
  if profile.method != method:
    raise ValueError(
      f"policy {policy!r} takes a profile of {method}, and this one is of {profile.method}"
    )
  return profile


def check(policy: str, profile: Profile | None, model: ModelConfig) -> None:
  """Raises ValueError, which names the policy, for a profile of other weights than the model's."""
  if profile is None:
    return
  try:
    if profile.method == METHOD:
      check_heads(profile, model)
    else:
      check_model(profile, model.content_hash)
  except ValueError as error:
    raise ValueError(f"policy {policy!r}: {error}") from error
