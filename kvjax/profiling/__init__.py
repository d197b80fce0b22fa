"""What policies want to know of a model before it runs: measured once, kept in one file."""

from kvjax.profiling.profile import Profile, check_model, load_profile, save_profile
from kvjax.profiling.unstable_heads import check_heads, heads_json, load_heads

__all__ = [
  "Profile",
  "check_heads",
  "check_model",
  "heads_json",
  "load_heads",
  "load_profile",
  "save_profile",
]
