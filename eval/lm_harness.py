"""Any model under any policy for the tasks of lm-evaluation-harness (PyPI: lm_eval).

    python -m eval.lm_harness --model kvjax --tasks lambada_openai --limit 20 --batch_size 4 \
      --model_args pretrained=smollm2-135m,policy=quest,budget_tokens=1024

is the harness' own command, `lm_eval`, with the model `kvjax` registered: the release this was
written for, 0.4.13, loads no models of others by itself (`--include_path` finds tasks only). In a
program, importing this module does the same:

    import eval.lm_harness
    lm_eval.simple_evaluate(model="kvjax", model_args="policy=snapkv,budget_tokens=512", tasks=...)

`eval.run_lm_harness` compares several policies in one run and writes result rows.

Contexts are prefilled, densely, but for their last token. That token and what follows it are decode
steps, so that the policy decides what every scored token is predicted from, the one answer letter
of a multiple choice included (`eval.scoring`). A context that several continuations share is
prefilled once. A context of one token, as `loglikelihood_rolling` has, is prefilled itself.
Generation is that of `kvjax.generate`, whose first token comes from the prefill.
"""

from __future__ import annotations

import itertools
import logging
import operator
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from eval import scoring
from kvjax import CacheConfig, KVCache, Runner, Sampling, make_policy, prepare
from kvjax.engine import steps
from kvjax.engine.generate import check_overflow, prefill
from kvjax.types import Policy
from models import Loaded, load

_LOG = logging.getLogger(__name__)
_CHUNKS = (64, 128, 256, 512)
_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}
_ONLY_SAMPLING = {"top_k", "min_p", "typical_p"}  # greedy decoding has no use for them
_copy = jax.jit(lambda cache: jax.tree.map(jnp.copy, cache))

Tokens = tuple[int, ...]


class _Span(NamedTuple):
  """Prefilled tokens, those fed and scored after them, and how many of the last ones count."""

  prompt: Tokens
  rest: list[int]
  wanted: int


class _Rules(NamedTuple):
  """How a text is made, the same for all rows of a batch."""

  until: tuple[str, ...]
  stop_ids: frozenset[int]
  new_tokens: int
  sampling: Sampling


@register_model("kvjax")
class KvjaxLM(TemplateLM):
  """A model under a policy, as the harness calls it.

  Args:
    pretrained: a source for `models.load`, or what it gave.
    policy: one word, as on command lines, or what `make_policy` gave.
    budget_tokens: tokens that the policy attends to.
    page_size: tokens of a page.
    store: where keys and values live; by default the policy's own first choice.
    batch_size: rows that are computed together; a number.
    max_length: most tokens that the model is given; by default what it was trained for. Contexts
      are cut from the left to fit.
    max_gen_toks: most new tokens where a task does not say.
    dtype: of weights and cache.
    seed: of sampling.
    max_batch_size: not used; the harness passes it.
    device: not used; the harness' command always passes one (cuda:0), and JAX chooses for itself
      (JAX_PLATFORMS).

  Raises:
    ValueError: a bad argument, or a model without a tokenizer.
  """

  def __init__(
    self,
    pretrained: str | Loaded = "smollm2-135m",
    policy: str | Policy = "dense",
    budget_tokens: int = 2048,
    page_size: int = 16,
    store: str | None = None,
    batch_size: int | str = 1,
    max_length: int | None = None,
    max_gen_toks: int = 256,
    dtype: str = "float32",
    seed: int = 0,
    max_batch_size: int | None = None,
    device: str | None = None,
  ):
    super().__init__()
    del max_batch_size, device
    if not str(batch_size).isdecimal() or int(batch_size) < 1:
      raise ValueError(f"batch_size {batch_size!r}: kvjax needs a positive number, and has no auto")
    if isinstance(policy, str):
      policy = make_policy(policy, budget_tokens=budget_tokens, page_size=page_size)
    self.policy = policy
    self.store, self.page_size = store or self.policy.stores[0], page_size
    self.loaded = load(pretrained, dtype) if isinstance(pretrained, str) else pretrained
    if self.loaded.tokenizer is None:
      raise ValueError(f"model {self.loaded.name} has no tokenizer to read tasks with")
    self.tokenizer = self.loaded.tokenizer
    self.batch_size, self.seed = int(batch_size), seed
    self.max_length = max_length or self.loaded.model.config.max_tokens
    self.max_gen_toks = max_gen_toks
    self.runner: Runner | None = None  # the newest
    self.step_s: list[float] = []  # of all decode steps so far

  @property
  def eot_token_id(self) -> int:
    """The token that ends a text."""
    return self.tokenizer.eos_ids[0]

  @property
  def prefix_token_id(self) -> int:
    """What stands before a text without a context: the token that starts texts, if there is one."""
    bos = self.tokenizer.bos_id
    return self.eot_token_id if bos is None else bos

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
    """Ids, with the token that starts texts where the model's files ask for it, or never."""
    del kwargs
    if add_special_tokens is False:
      return self.tokenizer.backend.encode(string, add_special_tokens=False).ids
    return self.tokenizer.encode(string)

  @property
  def tokenizer_name(self) -> str:
    """Tells tokenizers apart in the harness' cache of requests."""
    return f"{self.loaded.name}-{self.loaded.content_hash[:16]}"

  def apply_chat_template(
    self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
  ) -> str:
    """The text of a conversation; without a generation prompt its last message is left open."""
    text = self.tokenizer.chat(chat_history, add_generation_prompt)
    if add_generation_prompt:
      return text
    before, said, _ = text.rpartition(chat_history[-1]["content"].strip())
    return before + said

  def get_model_info(self) -> dict[str, Any]:
    """What the harness writes beside its results."""
    return {
      "model_source": self.loaded.name,
      "model_sha": self.loaded.content_hash,
      "policy": self.policy.name,
      "budget_tokens": self.policy.asked_tokens,
      "store": self.store,
    }

  def loglikelihood_rolling(
    self, requests: list[Instance], disable_tqdm: bool = False
  ) -> list[float]:
    """Log-likelihoods of whole texts, each token predicted once, in windows of `max_length`."""
    windows = [
      list(map(make_disjoint_window, self._windows(request.args[0]))) for request in requests
    ]
    scored = iter(
      self._loglikelihood_tokens(
        [(None, *window) for window in itertools.chain(*windows)], disable_tqdm
      )
    )
    sums = [sum(next(scored)[0] for _ in one) for one in windows]
    for request, found in zip(requests, sums, strict=True):
      self.cache_hook.add_partial("loglikelihood_rolling", request.args, found)
    return sums

  def _windows(self, text: str) -> Iterable[tuple[list[int], list[int]]]:
    ids = self.tok_encode(text, add_special_tokens=False)  # the prefix starts the text
    return get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)

  def _loglikelihood_tokens(
    self,
    requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
    disable_tqdm: bool = False,
    **kwargs: Any,
  ) -> list[tuple[float, bool]]:
    del kwargs
    if not requests:
      return []
    spans = [self._span(context, continuation) for _, context, continuation in requests]
    sharing: dict[Tokens, list[int]] = {}  # a prompt -> the requests that begin with it
    for place, span in enumerate(spans):
      sharing.setdefault(span.prompt, []).append(place)
    longest = {
      prompt: max(len(spans[place].rest) for place in places) for prompt, places in sharing.items()
    }
    order = sorted(sharing, key=lambda prompt: (-len(prompt) - longest[prompt], prompt))
    batches = list(itertools.batched(order, self.batch_size))
    runner = self._make_runner(
      [(max(map(len, batch)), max(longest[prompt] for prompt in batch)) for batch in batches]
    )
    answers: list[tuple[float, bool]] = [(0.0, True)] * len(spans)
    with tqdm(total=len(spans), disable=disable_tqdm, desc="kvjax loglikelihood") as bar:
      for batch in batches:
        for place, answer in self._scored(runner, batch, sharing, spans):
          answers[place] = answer
          if requests[place][0] is not None:
            self.cache_hook.add_partial("loglikelihood", requests[place][0], answer)
          bar.update()
    return answers

  def _span(self, context: list[int], continuation: list[int]) -> _Span:
    room = self.max_length + 1 - len(continuation)  # the last token is scored and not fed
    if room < 1:
      raise ValueError(
        f"a continuation has {len(continuation)} tokens, and max_length is {self.max_length}"
      )
    if len(context) > room:
      _LOG.warning("a context of %d tokens was cut from the left to %d", len(context), room)
    context = context[-room:]
    head = max(1, len(context) - 1)
    return _Span(tuple(context[:head]), [*context[head:], *continuation], wanted=len(continuation))

  def _scored(
    self,
    runner: Runner,
    batch: Sequence[Tokens],
    sharing: dict[Tokens, list[int]],
    spans: Sequence[_Span],
  ) -> Iterator[tuple[int, tuple[float, bool]]]:
    """Yields requests that begin with these prompts, by place, with their answers: the first of
    each prompt, then the second of those that have one, and so on."""
    last, cache = self._prefill(runner, batch)
    rounds = list(itertools.zip_longest(*(sharing[prompt] for prompt in batch)))
    for number, places in enumerate(rounds, 1):
      rows = [[] if place is None else spans[place].rest for place in places]
      rows += [[]] * (self.batch_size - len(rows))
      kept = cache if number == len(rounds) else _copy(cache)
      scores = scoring.follow(runner, self.loaded.params, last, kept, rows)
      self.step_s += scores.step_s
      for place, *found in zip(places, scores.log_probs, scores.greedy, strict=False):
        if place is not None:
          log_probs, greedy = (one[len(one) - spans[place].wanted :] for one in found)
          yield place, (float(log_probs.sum(dtype=np.float64)), bool(greedy.all()))

  def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
    """Texts up to the first of the strings that end them, an end token, or the limit.

    What is sampled depends on the seed, on the context, and on how often it came before, not on the
    order of the requests otherwise.
    """
    if not requests:
      return []
    groups: dict[_Rules, list[int]] = {}
    prompts: list[Tokens] = []
    for place, request in enumerate(requests):
      rules = self._rules(request.args[1])
      groups.setdefault(rules, []).append(place)
      prompts.append(self._prompt(request.args[0], rules.new_tokens))
    times = Counter[Tokens]()
    seeds = [self._row_seed(prompt, times) for prompt in prompts]
    runner = self._make_runner(
      [
        (len(prompts[place]), rules.new_tokens)
        for rules, places in groups.items()
        for place in places
      ]
    )
    texts = [""] * len(requests)
    with tqdm(total=len(requests), disable=disable_tqdm, desc="kvjax generate_until") as bar:
      for rules, places in groups.items():
        places.sort(key=lambda place: (-len(prompts[place]), prompts[place], seeds[place]))
        for batch in itertools.batched(places, self.batch_size):
          made = self._generated(
            runner, [prompts[p] for p in batch], [seeds[p] for p in batch], rules
          )
          for place, text in zip(batch, made, strict=True):
            texts[place] = text
            self.cache_hook.add_partial("generate_until", requests[place].args, text)
            bar.update()
    return texts

  def _rules(self, asked: dict[str, Any]) -> _Rules:
    wanted: dict[str, Any] = dict(normalize_gen_kwargs(asked, self.max_gen_toks))
    greedy = not wanted["do_sample"]
    unknown = sorted(set(wanted) - _KNOWN - (_ONLY_SAMPLING if greedy else set()))
    if unknown:
      raise ValueError(
        f"generation asks for {', '.join(unknown)}, which kvjax lacks; it has "
        f"{', '.join(sorted(_KNOWN))}"
      )
    temperature = 0.0 if greedy else float(wanted.get("temperature", 1.0))
    until = tuple(one for one in wanted["until"] if one)
    special = (
      self.tokenizer.backend.token_to_id(one) for one in until
    )  # have no text of their own
    return _Rules(
      until,
      frozenset([*self.tokenizer.eos_ids, *(one for one in special if one is not None)]),
      wanted["max_gen_toks"],
      Sampling(temperature, float(wanted.get("top_p", 1.0))),
    )

  def _prompt(self, context: str, new_tokens: int) -> Tokens:
    room = self.max_length - new_tokens
    if room < 1:
      raise ValueError(
        f"max_gen_toks {new_tokens} leave no room for a context: max_length is {self.max_length}"
      )
    ids = self.tok_encode(context) or [self.prefix_token_id]
    if len(ids) > room:
      _LOG.warning("a context of %d tokens was cut from the left to %d", len(ids), room)
    return tuple(ids[-room:])

  def _row_seed(self, prompt: Tokens, times: Counter[Tokens]) -> int:
    times[prompt] += 1
    return zlib.crc32(repr((self.seed, times[prompt], prompt)).encode())

  def _generated(
    self, runner: Runner, prompts: Sequence[Tokens], seeds: Sequence[int], rules: _Rules
  ) -> list[str]:
    params = self.loaded.params
    last, cache = self._prefill(runner, prompts)
    filled = np.array([*seeds, *[0] * (self.batch_size - len(seeds))], np.uint32)
    key = jax.vmap(jax.random.key)(filled)
    tokens = steps.first_token(runner, rules.sampling, params, last, key, cache.lengths)
    made: list[list[int]] = [[] for _ in prompts]
    going = set(range(len(prompts)))
    while True:
      for row in list(going):
        made[row].append(int(tokens[row]))
        if len(made[row]) == rules.new_tokens or self._ended(made[row], rules):
          going.remove(row)
      if not going:
        break
      begin = time.perf_counter()
      tokens, cache = steps.next_token(runner, rules.sampling, params, cache, tokens, key)
      tokens.block_until_ready()
      self.step_s.append(time.perf_counter() - begin)
    check_overflow(runner, cache)
    return [self._text(ids, rules) for ids in made]

  def _ended(self, ids: Sequence[int], rules: _Rules) -> bool:
    text = self.tokenizer.decode(ids) if rules.until else ""
    return ids[-1] in rules.stop_ids or any(one in text for one in rules.until)

  def _text(self, ids: Sequence[int], rules: _Rules) -> str:
    text = self.tokenizer.decode(ids[:-1] if ids[-1] in rules.stop_ids else ids)
    for one in rules.until:
      text = text.partition(one)[0]
    return text

  def _make_runner(self, sizes: Iterable[tuple[int, int]]) -> Runner:
    """The runner for prompts and what follows them, of these sizes; capacities are powers of two,
    so that few are compiled."""
    prompts, rests = zip(*sizes, strict=True)
    capacity = 1 << max(6, (max(map(operator.add, prompts, rests)) - 1).bit_length())
    chunk = next((one for one in _CHUNKS if one >= max(prompts)), _CHUNKS[-1])
    dtype = jax.tree.leaves(self.loaded.params)[0].dtype.name
    config = CacheConfig(
      self.batch_size, capacity, self.page_size, dtype, base_tokens=min(capacity, 1024)
    )
    self.runner = prepare(self.loaded.model, self.policy, self.store, config, chunk_tokens=chunk)
    return self.runner

  def _prefill(self, runner: Runner, prompts: Sequence[Tokens]) -> tuple[jax.Array, KVCache]:
    """Prefills a batch, with rows of one token where it is not full."""
    rows = [*prompts, *[(0,)] * (self.batch_size - len(prompts))]
    return prefill(runner, self.loaded.params, rows)


if __name__ == "__main__":
  from lm_eval.__main__ import cli_evaluate

  cli_evaluate()
