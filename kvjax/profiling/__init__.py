"""What policies want to know of a model before it runs: measured once, kept in one file."""

from kvjax.profiling.profile import Profile, check_model, load_profile, save_profile

__all__ = ["Profile", "check_model", "load_profile", "save_profile"]
