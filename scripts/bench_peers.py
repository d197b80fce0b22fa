"""kvjax beside Hugging Face transformers and llama.cpp: the same weights, prompt and threads.

    python -m scripts.bench_peers --peer_python=PATH --out_dir=DIR

`--peer_python` is an interpreter that has torch, transformers and llama-cpp-python; none of them is
a dependency of kvjax. Both peers get f32 weights, dequantized once from the model's GGUF file, all
get the same prompt and the same number of threads, and decode in alternating short rounds, so that
other work on the machine falls on all of them alike. Whether all choose the same tokens is shown.

llama.cpp runs with its binding's defaults, which favour its decoding: a KV cache in f16, half the
bytes of the others', and no flash attention (measured on 2 cores at 7,680 tokens: 50 ms a step and
43 s of prefill without it, 122 ms and 30 s with it).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
from absl import flags
from tqdm import tqdm

from eval import cli, texts
from eval.results import append_row, check_new_run, make_manifest, make_row, percentiles, start_run
from eval.run_throughput import (
  ROUND_STEPS,
  Weights,
  advance,
  compile_runner,
  make_prompts,
  pick_policies,
  start_lane,
  weights,
)
from eval.tables import human_bytes, table
from kvjax import CacheConfig, Runner, prepare
from kvjax.engine.generate import check_request
from models import gguf_reader, load
from models.fetch import cache_dir
from scripts.peer_worker import Peer, start_peer

PEERS = {"transformers": "transformers f32", "llama_cpp": "llama.cpp f32"}
_PAUSE_S = 0.3  # lets the threads of whoever ran before go to sleep
_COLUMNS = (
  "policy",
  "budget_tokens",
  "ttft_s_p50",
  "tpot_s_p50",
  "tpot_s_p99",
  "decode_tokens_per_s",
  "speedup_vs_dense",
  "tokens_as_dense",
)


def f32_weights(source: Path, target: Path) -> Path:
  """The weights of a GGUF file dequantized to f32, as a GGUF file that both peers load.

  Args:
    source: a GGUF file of architecture llama.
    target: where the result is kept; written whole or not at all, and only once.
  """
  if not target.exists():
    print(f"writing {source.name} in f32 for the peers to {target}", flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="peers-") as folder:
      partial = Path(folder) / target.name
      _write_gguf(source, partial)
      partial.replace(target)
  return target


def _write_gguf(source: Path, target: Path) -> None:
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


class Measured(NamedTuple):
  """One contestant's samples: seconds, and the tokens that it chose."""

  name: str
  budget_tokens: int | None
  prefill_s: float
  step_s: list[float]
  tokens: list[int]


def define_flags() -> None:
  """The flags of this command."""
  cli.define_model_flag()
  flags.DEFINE_string("peer_python", None, "A Python with torch, transformers, llama-cpp-python.")
  flags.DEFINE_list("peers", list(PEERS), "Peers to compare with.")
  flags.DEFINE_integer("prompt_tokens", 7680, "Length of the prompt.", lower_bound=1)
  flags.DEFINE_integer("output_tokens", 24, "Decode steps to time.", lower_bound=1)
  flags.DEFINE_integer("budget_tokens", 1024, "Budget of quest.")
  flags.DEFINE_string("text_file", None, "UTF-8 text of the prompt; the King James Bible if none.")
  cli.define_page_size_flag()
  cli.define_out_dir("peers")


def main(args: flags.FlagValues) -> None:
  """Checks everything, opens the peers, measures, writes."""
  out_dir = Path(args.out_dir).expanduser()
  check_new_run(out_dir)
  _check_peers(args.peer_python, args.peers)
  names = ["dense", "quest"]
  policies = pick_policies(names, [], [args.budget_tokens], args.page_size)
  text = texts.read_text(Path(args.text_file)) if args.text_file else texts.king_james()
  loaded = load(args.model)
  if loaded.path is None or loaded.path.suffix != ".gguf":
    raise ValueError(f"--model={args.model} is not a GGUF file, which the peers need; give one")
  capacity = args.prompt_tokens + args.output_tokens
  [prompt] = make_prompts(loaded, text, args.prompt_tokens, 1)
  config = CacheConfig(1, capacity, args.page_size, base_tokens=capacity)
  runners = [prepare(loaded.model, policy, store, config) for policy, store in policies]
  check_request(runners[0], [prompt], args.output_tokens)
  data = {args.text_file or "king james": hashlib.sha256(text.encode()).hexdigest()}
  manifest = make_manifest(cli.flag_values(), loaded, data)
  threads = manifest["cores"] or os.cpu_count() or 1
  print(
    f"model {loaded.name}, {args.prompt_tokens} tokens of prompt, {args.output_tokens} decode "
    f"steps, batch 1, {threads} threads, f32\nKV on device: "
    + ", ".join(f"{one.policy.name} {human_bytes(one.decode_bytes.total)}" for one in runners),
    flush=True,
  )
  file = f32_weights(loaded.path, cache_dir() / f"f32-{loaded.content_hash[:12]}.gguf")
  with contextlib.ExitStack() as stack:
    peers = {
      name: stack.enter_context(start_peer(name, args.peer_python, file, capacity, threads))
      for name in args.peers
    }
    measured = measure(peers, runners, weights(loaded, 1), prompt, args.output_tokens)
  rows = _rows(
    measured,
    prompt_tokens=len(prompt),
    model=loaded.name,
    page_size=args.page_size,
    device=manifest["device"],
  )
  manifest["peers"] = {name: peer.version for name, peer in peers.items()}
  start_run(out_dir, manifest)
  for row in rows:
    append_row(out_dir, row)
  print(f"\n{table(rows, _COLUMNS)}\n{_ratios(measured)}\n\nwritten to {out_dir}")


def measure(
  peers: Mapping[str, Peer],
  runners: Sequence[Runner],
  params: Weights,
  prompt: list[int],
  steps: int,
) -> list[Measured]:
  """Warms all up, lets each read the prompt, then decodes in alternating rounds.

  Args:
    peers: running peers by name.
    runners: ours, from `kvjax.prepare`, dense first.
    params: weights of ours, for a batch of one.
    prompt: token ids.
    steps: decode steps to time.
  """
  for peer in peers.values():
    peer.ask(prefill=prompt[:64])
    peer.ask(steps=2)
  for runner in runners:
    compile_runner(runner, params)
  lanes, prefills, replies = [], {}, {name: ([], []) for name in peers}
  with tqdm(total=len(peers) + len(runners), desc="prefill", unit="prompt") as bar:
    for name, peer in peers.items():
      reply = peer.ask(prefill=prompt)
      prefills[name] = reply["prefill_s"]
      replies[name][1].extend(reply["tokens"])
      bar.update()
    for runner in runners:
      time.sleep(_PAUSE_S)
      lanes.append(start_lane(runner, params, [prompt]))
      bar.update()
  for done in tqdm(range(0, steps, ROUND_STEPS), desc="decode", unit="round"):
    count = min(ROUND_STEPS, steps - done)
    for name, peer in peers.items():
      time.sleep(_PAUSE_S)
      reply = peer.ask(steps=count)
      replies[name][0].extend(reply["step_s"])
      replies[name][1].extend(reply["tokens"])
    for index, lane in enumerate(lanes):
      time.sleep(_PAUSE_S)
      lanes[index] = advance(lane, count)
  ours = [
    Measured(
      lane.runner.policy.name,
      lane.runner.policy.budget_tokens,
      lane.ttft_s,
      list(lane.step_s),
      list(lane.made),
    )
    for lane in lanes
  ]
  return ours + [Measured(PEERS[name], None, prefills[name], *replies[name]) for name in peers]


def same_tokens(tokens: Sequence[int], reference: Sequence[int]) -> str:
  """The word agree, or where two greedy continuations part."""
  for place, (one, other) in enumerate(zip(tokens, reference, strict=True), start=1):
    if one != other:
      return f"differs at token {place}"
  return "agree"


def _rows(measured: Sequence[Measured], prompt_tokens: int, **common: Any) -> list[dict[str, Any]]:
  dense = measured[0]
  return [
    make_row(
      policy=one.name,
      budget_tokens=one.budget_tokens,
      batch_size=1,
      task="peers",
      prompt_tokens=prompt_tokens,
      output_tokens=len(one.step_s),
      prefill_tokens_per_s=prompt_tokens / one.prefill_s,
      decode_tokens_per_s=len(one.step_s) / sum(one.step_s),
      speedup_vs_dense=statistics.median(dense.step_s) / statistics.median(one.step_s),
      simulated=False,
      **percentiles("ttft_s", [one.prefill_s]),
      **percentiles("tpot_s", one.step_s),
      **common,
    )
    | {"tokens_as_dense": same_tokens(one.tokens, dense.tokens)}
    for one in measured
  ]


def _ratios(measured: Sequence[Measured]) -> str:
  """How many times faster each of ours is than each peer."""
  ours = [one for one in measured if one.name not in PEERS.values()]
  return "\n".join(
    f"{one.name} over {peer.name}: decode "
    f"{statistics.median(peer.step_s) / statistics.median(one.step_s):.2f}x, "
    f"prefill {peer.prefill_s / one.prefill_s:.2f}x"
    for peer in measured
    if peer.name in PEERS.values()
    for one in ours
  )


def _check_peers(python: str | None, names: Sequence[str]) -> None:
  if not python:
    raise ValueError(
      "--peer_python is missing; give the path of a Python that has torch, transformers and "
      "llama-cpp-python"
    )
  unknown = [name for name in names if name not in PEERS]
  if unknown or not names:
    raise ValueError(f"--peers={','.join(names)}: expected some of {', '.join(PEERS)}")


if __name__ == "__main__":
  cli.run(main, define_flags)
