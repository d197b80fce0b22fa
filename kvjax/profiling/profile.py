"""What was measured of a model, in one file that knows which model it was."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_ABOUT = "about"


class Profile(NamedTuple):
  """A measurement.

  Attributes:
    method: what was measured, e.g. "skewing".
    model: name of the model.
    content_hash: sha256 of its weights, as `models.Loaded` has it.
    settings: what it was measured with: text, tokens, seed.
    arrays: the results by name.
  """

  method: str
  model: str
  content_hash: str
  settings: Mapping[str, Any]
  arrays: Mapping[str, np.ndarray]


def save_profile(path: Path, profile: Profile) -> None:
  """Writes a new .npz file of the arrays and, as JSON, the rest.

  Raises:
    FileExistsError: there is such a file.
  """
  about = json.dumps(profile._replace(arrays={})._asdict(), sort_keys=True)
  content: dict[str, Any] = {_ABOUT: np.array(about), **profile.arrays}
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("xb") as file:
    np.savez_compressed(file, **content)


def load_profile(path: str | Path, method: str) -> Profile:
  """Reads a profile of this method; `check_model` says whether it is one of a certain model.

  Args:
    path: from `save_profile`.
    method: what it must be a profile of.

  Raises:
    ValueError: there is no such file, it is no profile, or one of another method.
  """
  path = Path(path).expanduser()
  if not path.is_file():
    raise ValueError(f"{path} is not a file; make a profile with scripts.profile_policy")
  try:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
      arrays = {name: content[name] for name in content.files}
    about = json.loads(str(arrays.pop(_ABOUT)))
    profile = Profile(**about | {"arrays": arrays})
  except (zipfile.BadZipFile, ValueError, KeyError, TypeError, EOFError) as error:
    raise ValueError(f"{path} is no profile; make one with scripts.profile_policy") from error
  if profile.method != method:
    raise ValueError(f"{path} is a profile of {profile.method}, expected one of {method}")
  return profile


def check_model(profile: Profile, content_hash: str) -> None:
  """Raises ValueError for a profile of other weights than these, or where "" says nothing of them.

  Args:
    profile: what was measured.
    content_hash: of the model that will run with it.
  """
  if not content_hash:
    raise ValueError(
      f"the profile is one of {profile.model}, and the weights of this model are unknown; use "
      "models.load, or set content_hash in the model's config to what they are"
    )
  if profile.content_hash != content_hash:
    raise ValueError(
      f"the profile is one of {profile.model} with sha256 {profile.content_hash[:16]}, and the "
      f"model has {content_hash[:16]}; make one of this model with scripts.profile_policy"
    )
