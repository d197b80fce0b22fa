"""kvjax beside Hugging Face transformers and llama.cpp: the same weights, prompt and threads.

    python -m scripts.bench_peers --peer_python=PATH --out_dir=DIR

`--peer_python` is an interpreter that has torch, transformers and llama-cpp-python; none of them is
a dependency of kvjax. Both peers get f32 weights, dequantized once from the model's GGUF file, all
get the same prompt and the same number of threads, and decode in alternating short rounds, so that
other work on the machine falls on all of them alike. llama.cpp keeps its KV cache in f16, its
default and about half the bytes; the others in f32.

A peer is this same file, run by the other interpreter as `--worker=NAME`: that half needs nothing
but the standard library and the peer itself, which is why everything of ours is imported inside
functions. It answers JSON lines on its standard output: `{"prefill": ids}` starts a prompt,
`{"steps": n}` decodes n tokens greedily.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

PEERS = {"transformers": "transformers f32", "llama_cpp": "llama.cpp f32"}

# The peers' half.


class Stepper(NamedTuple):
  """One peer: `prefill(ids)` and `step(token)` both return the next token, greedily."""

  version: str
  prefill: Callable[[list[int]], int]
  step: Callable[[int], int]


def open_transformers(folder: str, capacity_tokens: int, threads: int) -> Stepper:
  """Llama of transformers on torch, f32, scaled-dot-product attention, its default cache."""
  del capacity_tokens
  import torch
  import transformers

  torch.set_num_threads(threads)
  torch.set_grad_enabled(False)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="sdpa"
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


def open_llama_cpp(path: str, capacity_tokens: int, threads: int) -> Stepper:
  """llama.cpp with f32 weights and otherwise its defaults."""
  import llama_cpp
  import numpy as np

  model = llama_cpp.Llama(
    path,
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


def worker(name: str, weights: str, capacity_tokens: int, threads: int) -> None:
  """Answers requests until its standard input ends."""
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


# Our half.


def f32_weights(gguf_path: Path, folder: Path) -> dict[str, Path]:
  """The weights of a GGUF file dequantized to f32, once: what each peer loads.

  Args:
    gguf_path: a GGUF file of architecture llama.
    folder: where they are kept; written whole or not at all.

  Returns:
    {"llama_cpp": a GGUF file, "transformers": a folder as the hub lays it out}
  """
  if not folder.exists():
    print(f"writing {gguf_path.name} as f32 for the peers into {folder}", flush=True)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    _write_gguf(gguf_path, partial / "model-f32.gguf")
    _write_hub_folder(gguf_path, partial)
    partial.rename(folder)
  return {"llama_cpp": folder / "model-f32.gguf", "transformers": folder}


def _write_gguf(source: Path, target: Path) -> None:
  import gguf

  from models import gguf_reader

  reader = gguf_reader.open_gguf(source)
  writer = gguf.GGUFWriter(target, "llama")
  for name, field in reader.fields.items():
    # The writer adds the first two itself; the third would be wrong now.
    if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
      continue
    kind = field.types[0]
    inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(name, field.contents(), kind, sub_type=inner)
  writer.add_file_type(gguf.LlamaFileType.ALL_F32)
  for tensor in reader.tensors:
    writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def _write_hub_folder(source: Path, folder: Path) -> None:
  import numpy as np
  from safetensors.numpy import save_file

  from models import gguf_reader

  reader = gguf_reader.open_gguf(source)
  checkpoint = gguf_reader.read(reader, gguf_reader.metadata(reader), source)
  tensors = {name: np.ascontiguousarray(checkpoint.read(name)) for name in checkpoint.shapes}
  save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
  config = checkpoint.config
  described = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "hidden_size": config.embed_dim,
    "intermediate_size": config.ffn_dim,
    "vocab_size": config.vocab_size,
    "max_position_embeddings": config.max_tokens,
    "rope_theta": config.rope_theta,
    "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    "rms_norm_eps": config.norm_eps,
    "tie_word_embeddings": config.tied_embeddings,
  }
  (folder / "config.json").write_text(json.dumps(described, indent=1), encoding="utf-8")


class Peer(NamedTuple):
  """A running peer: its version, and `ask(**request)` for one reply."""

  version: str
  ask: Callable[..., dict[str, Any]]


@contextlib.contextmanager
def start_peer(
  name: str, python: str, weights: Path, capacity_tokens: int, threads: int
) -> Iterator[Peer]:
  """Runs one peer until the context ends.

  Raises:
    ValueError: the interpreter, or the package in it, is missing, or the peer failed.
  """
  command = [python, __file__, f"--worker={name}", str(weights), str(capacity_tokens), str(threads)]
  environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
  try:
    process = subprocess.Popen(
      command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
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


if __name__ == "__main__":
  if len(sys.argv) == 5 and sys.argv[1].startswith("--worker="):
    worker(sys.argv[1].removeprefix("--worker="), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
