"""Which heads are unstable: FlexiCache's profile of a model, as a JSON file that people can read.

A profile is a `Profile` of the method "head_stability", whose arrays are `unstable_heads` i32[M, 2]
(layer, KV head) and, where it was measured here, `instability` f64[L, K]. It is one of a model (by
the hash of its weights), a page size and a number K of pages: another K has other unstable heads.

The sets that the authors published (model_unstable_heads_data.json of their artifact) are read as
they are. That file has several of four models, under names as
"unstable-64-profile-gov_report-topk-128": 64 heads, the text of the profile, 128 pages of 16
tokens. "FILE#MODEL/TEXT" is one of them: `data.json#Llama-3.1-8B-Instruct/gov_report`.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.config import ModelConfig
from kvjax.profiling.head_stability import METHOD
from kvjax.profiling.profile import Profile, check_model

_PUBLISHED = re.compile(r"unstable-(\d+)-profile-(.+)-topk-(\d+)")
_PUBLISHED_PAGE = 16  # tokens of the original's pages
_PUBLISHED_SHARE = 4  # its profiles name a quarter of the heads
_HOW = "make one with scripts.profile_heads"
_Set = tuple[str, str, int, np.ndarray]


def heads_json(profile: Profile) -> str:
  """The content of a file of a profile; one line for each layer's scores."""
  about = profile._asdict() | {name: value.tolist() for name, value in profile.arrays.items()}
  del about["arrays"]
  text = json.dumps(about, indent=2, sort_keys=True)
  return re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


def load_heads(source: str | Path, pages: int, page_size: int) -> Profile:
  """Reads our profile, or a published set, of this many pages.

  Args:
    source: a path, or FILE#MODEL/TEXT of a file with several sets.
    pages: K.
    page_size: tokens of a page.

  Raises:
    ValueError: there is no such file, it is neither, or has no set of K pages, or several.
  """
  name, _, wanted = str(source).partition("#")
  path = Path(name).expanduser()
  if not path.is_file():
    raise ValueError(f"{path} is not a file; {_HOW}")
  try:
    content = json.loads(path.read_text(encoding="utf-8"))
    found = _ours(content) if "method" in content else _sets_of(content)
  except (KeyError, TypeError, AttributeError, ValueError) as error:
    raise ValueError(f"{path} is no profile of heads; {_HOW}") from error
  profile = found if isinstance(found, Profile) else _chosen(found, path, wanted, pages, page_size)
  check_pages(profile, pages, page_size)
  return profile


def check_pages(profile: Profile, pages: int, page_size: int) -> None:
  """Raises ValueError for a profile of another method, number of pages or page size."""
  if profile.method != METHOD:
    raise ValueError(f"expected a profile of {METHOD}, and this one is of {profile.method}; {_HOW}")
  has = profile.settings["pages"], profile.settings["page_size"]
  if has != (pages, page_size):
    raise ValueError(
      f"the profile is one of {has[0]} pages of {has[1]} tokens, and the budget is {pages} of "
      f"{page_size}; give budget_tokens {has[0] * has[1]} or {_HOW}"
    )


def check_heads(profile: Profile, model: ModelConfig) -> None:
  """Says whether a profile is one of this model; warns of what a published set does not tell.

  Raises:
    ValueError: it is one of other weights or of another number of layers and heads.
  """
  settings, heads = profile.settings, profile.arrays["unstable_heads"]
  shape = model.num_layers, model.num_kv_heads
  if "published" not in settings:
    check_model(profile, model.content_hash)
    if tuple(settings["shape"]) != shape:
      raise ValueError(_of_another(profile, "{} layers of {}".format(*settings["shape"]), shape))
    return
  total = _PUBLISHED_SHARE * len(heads)
  if (heads >= shape).any() or total != shape[0] * shape[1]:
    raise ValueError(_of_another(profile, f"{total} in all", shape))
  warnings.warn(
    f"{profile.model}, {settings['published']}: the number of heads fits this model; whether it is "
    "the model that was profiled cannot be checked, as published sets do not say of which weights",
    stacklevel=2,
  )


def _of_another(profile: Profile, has: str, shape: tuple[int, int]) -> str:
  return (
    f"the profile of {profile.model} is one of KV heads {has}, and the model has {shape[0]} layers "
    f"of {shape[1]}; {_HOW} of this model"
  )


def _ours(content: Mapping[str, Any]) -> Profile:
  about = {name: content[name] for name in Profile._fields if name != "arrays"}
  arrays = {name: np.array(content[name]) for name in content.keys() - about.keys()}
  arrays["unstable_heads"] = _pairs(content["unstable_heads"])
  settings = about["settings"]
  if {"pages", "page_size"} - {*settings} or [*arrays["instability"].shape] != settings["shape"]:
    raise KeyError("settings")
  return Profile(**about, arrays=arrays)


def _pairs(heads: Any) -> np.ndarray:
  return np.array(heads, np.int32).reshape(-1, 2)


def _sets_of(content: Mapping[str, Mapping[str, Any]]) -> list[_Set]:
  """(model, text, K, heads) of each published set.

  Raises:
    KeyError: a name that no published set has.
  """
  sets = []
  for model, by_name in content.items():
    for name, heads in by_name.items():
      found = _PUBLISHED.fullmatch(name)
      if found is None or int(found[1]) != len(heads):
        raise KeyError(name)
      sets.append((model, found[2], int(found[3]), _pairs(heads)))
  return sets


def _chosen(sets: Sequence[_Set], path: Path, wanted: str, pages: int, page_size: int) -> Profile:
  """The one set of K pages that fits what stands behind the #."""
  of_model, _, of_text = wanted.rpartition("/")
  fitting = [
    one
    for one in sets
    if one[0].endswith(of_model) and one[1].startswith(of_text) and one[2] == pages
  ]
  if page_size != _PUBLISHED_PAGE or len(fitting) != 1:
    known = ", ".join(f"{path.name}#{model}/{text} of {k} pages" for model, text, k, _ in sets)
    raise ValueError(
      f"{path}#{wanted} is {len(fitting)} published sets of {pages} pages of {page_size} tokens, "
      f"expected one of {_PUBLISHED_PAGE}; there are {known}"
    )
  [(model, text, _, heads)] = fitting
  settings = {"pages": pages, "page_size": page_size, "published": text}
  return Profile(METHOD, model, "", settings, {"unstable_heads": heads})
