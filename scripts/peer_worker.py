"""Both ends of the talk with a peer: `start_peer` here, `worker` in the peer's interpreter.

`start_peer` runs this file by its path, in the interpreter that has the peer, as

    peer_worker.py NAME WEIGHTS CAPACITY_TOKENS THREADS

so it needs nothing but the standard library of Python 3.11 and the peer itself. The worker answers
JSON lines on its standard output: `{"prefill": ids}` starts a prompt, `{"steps": n}` decodes n
tokens greedily.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

_ENVIRONMENT = {
  "HF_HUB_OFFLINE": "1",
  "HF_HUB_DISABLE_PROGRESS_BARS": "1",
  "TRANSFORMERS_VERBOSITY": "error",
  "PYTHONWARNINGS": "ignore",
}


class Stepper(NamedTuple):
  """One peer: `prefill(ids)` and `step(token)` both return the next token, greedily."""

  version: str
  prefill: Callable[[list[int]], int]
  step: Callable[[int], int]


def open_transformers(path: Path, capacity_tokens: int, threads: int) -> Stepper:
  """Llama of transformers on torch, f32, scaled-dot-product attention, its default cache."""
  del capacity_tokens
  torch = importlib.import_module("torch")
  transformers = importlib.import_module("transformers")
  torch.set_num_threads(threads)
  torch.set_grad_enabled(False)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
  ).eval()
  state: dict[str, Any] = {}

  def run(ids: list[int]) -> int:
    out = model(
      torch.tensor([ids]), past_key_values=state.get("cache"), use_cache=True, logits_to_keep=1
    )
    state["cache"] = out.past_key_values
    return int(out.logits[0, -1].argmax())

  def prefill(ids: list[int]) -> int:
    state.clear()
    return run(ids)

  version = f"transformers {transformers.__version__}, torch {torch.__version__}"
  return Stepper(version, prefill, lambda token: run([token]))


def open_llama_cpp(path: Path, capacity_tokens: int, threads: int) -> Stepper:
  """llama.cpp with f32 weights and otherwise its defaults."""
  llama_cpp = importlib.import_module("llama_cpp")
  np = importlib.import_module("numpy")
  model = llama_cpp.Llama(
    str(path),
    n_ctx=capacity_tokens,
    n_threads=threads,
    n_threads_batch=threads,
    n_gpu_layers=0,
    verbose=False,
  )
  vocab = model.n_vocab()

  def run(ids: list[int]) -> int:
    model.eval(ids)
    logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    return int(np.ctypeslib.as_array(logits, shape=(vocab,)).argmax())

  def prefill(ids: list[int]) -> int:
    model.reset()
    return run(ids)

  version = f"llama-cpp-python {llama_cpp.__version__}"
  return Stepper(version, prefill, lambda token: run([token]))


def worker(name: str, weights: Path, capacity_tokens: int, threads: int) -> None:
  """Answers requests until its standard input ends."""
  del sys.path[0]  # this folder; its modules must not hide the peer's
  replies = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # whatever the peer prints must not mix with the replies

  def reply(**message: Any) -> None:
    print(json.dumps(message), file=replies, flush=True)

  opener = {"transformers": open_transformers, "llama_cpp": open_llama_cpp}[name]
  try:
    stepper = opener(weights, capacity_tokens, threads)
  except Exception as error:
    reply(error=f"{type(error).__name__}: {error}")
    return
  reply(version=stepper.version)
  token = 0
  for line in sys.stdin:
    request = json.loads(line)
    if "prefill" in request:
      start = time.perf_counter()
      token = stepper.prefill(request["prefill"])
      reply(prefill_s=time.perf_counter() - start, tokens=[token])
      continue
    step_s, tokens = [], []
    for _ in range(request["steps"]):
      start = time.perf_counter()
      token = stepper.step(token)
      step_s.append(time.perf_counter() - start)
      tokens.append(token)
    reply(step_s=step_s, tokens=tokens)


class Peer(NamedTuple):
  """A running peer: its version, and `ask(**request)` for one reply."""

  version: str
  ask: Callable[..., dict[str, Any]]


@contextlib.contextmanager
def start_peer(
  name: str, python: str, weights: Path, capacity_tokens: int, threads: int
) -> Generator[Peer]:
  """Runs one peer until the context ends.

  Raises:
    ValueError: the interpreter, or the package in it, is missing, or the peer failed.
  """
  command = [python, __file__, name, str(weights), str(capacity_tokens), str(threads)]
  environment = os.environ | _ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
  try:
    process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=environment,
      start_new_session=True,  # an interrupt is ours to report; the worker ends with its input
    )
  except OSError as error:
    raise ValueError(
      f"--peer_python={python} cannot be run ({error.strerror}); expected the path of a Python "
      "that has torch, transformers and llama-cpp-python"
    ) from error
  assert process.stdin is not None and process.stdout is not None
  requests, replies = process.stdin, process.stdout

  def read() -> dict[str, Any]:
    line = replies.readline()
    message = json.loads(line) if line else {"error": "it ended without a word"}
    if "error" in message:
      raise ValueError(
        f"peer {name} does not work in {python}: {message['error']}; install it there, or leave it "
        "out of --peers"
      )
    return message

  def ask(**request: Any) -> dict[str, Any]:
    with contextlib.suppress(BrokenPipeError):  # it ended, which `read` reports
      print(json.dumps(request), file=requests, flush=True)
    return read()

  try:
    yield Peer(read()["version"], ask)
  finally:
    with contextlib.suppress(BrokenPipeError):
      requests.close()
    try:
      process.wait(timeout=10)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
    replies.close()


if __name__ == "__main__":
  name, weights, capacity_tokens, threads = sys.argv[1:]
  worker(name, Path(weights), int(capacity_tokens), int(threads))
