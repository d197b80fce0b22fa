"""Fetches the data of LongBench and L-Eval from the Hugging Face hub, when a user asks for it."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval import leval

LONGBENCH, LONGBENCH_FILE = "THUDM/LongBench", "data.zip"
LEVAL = "L4NLP/LEval"


def fetch_longbench(names: Sequence[str], data_dir: Path) -> None:
  """Puts TASK.jsonl of some tasks into a folder; says first what is fetched.

  Raises:
    ValueError: the hub cannot be reached, or its archive lacks a task or is damaged.
  """
  print(f"fetching {LONGBENCH_FILE} of {LONGBENCH} from huggingface.co into {data_dir}", flush=True)
  archive = Path(_download(LONGBENCH, LONGBENCH_FILE, data_dir))
  try:
    with zipfile.ZipFile(archive) as opened:
      members = {Path(one).name: one for one in opened.namelist()}
      for name in names:
        if f"{name}.jsonl" not in members:
          raise ValueError(f"{archive} has no {name}.jsonl; fetch the data by hand")
        _extract(opened, members[f"{name}.jsonl"], data_dir / f"{name}.jsonl")
  except zipfile.BadZipFile as error:
    raise ValueError(f"{archive} is damaged ({error}); delete it and fetch it again") from error


def fetch_leval(names: Sequence[str], data_dir: Path) -> None:
  """Puts the files of some tasks into a folder, as the hub has them; says first what is fetched.

  Raises:
    ValueError: the hub cannot be reached, or lacks a task.
  """
  files = [f"LEval/{_leval_folder(name)}/{name}.jsonl" for name in names]
  print(f"fetching {', '.join(files)} of {LEVAL} from huggingface.co into {data_dir}", flush=True)
  for file in files:
    _download(LEVAL, file, data_dir)


def _leval_folder(name: str) -> str:
  return "Exam" if leval.TASKS[name].metric == "exact_match" else "Generation"


def _download(repository: str, file: str, data_dir: Path) -> str:
  hub = _package()
  data_dir.mkdir(parents=True, exist_ok=True)
  try:
    return hub.hf_hub_download(
      repo_id=repository, filename=file, repo_type="dataset", local_dir=str(data_dir)
    )
  except Exception as error:  # of the hub or of whatever it uses for the network
    raise ValueError(
      f"{file} of {repository} could not be fetched ({error}); check the network, or fetch it by "
      "hand into --data_dir"
    ) from error


def _extract(archive: zipfile.ZipFile, member: str, path: Path) -> None:
  """Writes a member of an archive, whole or not at all."""
  partial = path.with_name(f".{path.name}.part")
  with archive.open(member) as source, partial.open("wb") as target:
    shutil.copyfileobj(source, target)
  partial.replace(path)


def _package() -> Any:
  try:
    import huggingface_hub
  except ImportError as error:
    raise ValueError(
      "--download needs the package huggingface_hub; install it with pip install kvjax[eval]"
    ) from error
  return huggingface_hub
