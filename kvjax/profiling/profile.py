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


def load_profile(path: Path, method: str, content_hash: str) -> Profile:
  """Reads a profile of this method and of this very model.

  Args:
    path: from `save_profile`.
    method: what it must be a profile of.
    content_hash: of the model that will run with it.

  Raises:
    ValueError: it is no profile, one of another method, or one of another model.
  """
  try:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
      arrays = {name: content[name] for name in content.files}
    about = json.loads(str(arrays.pop(_ABOUT)))
    profile = Profile(**about | {"arrays": arrays})
  except (zipfile.BadZipFile, ValueError, KeyError, TypeError, EOFError) as error:
    raise ValueError(f"{path} is no profile; make one with scripts.profile_policy") from error
  if profile.method != method:
    raise ValueError(f"{path} is a profile of {profile.method}, expected one of {method}")
  if profile.content_hash != content_hash:
    raise ValueError(
      f"{path} is a profile of {profile.model} with sha256 {profile.content_hash[:16]}, and the "
      f"model has {content_hash[:16]}; make a profile of this model"
    )
  return profile
