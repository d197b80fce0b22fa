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

What is computed together depends on all that is asked in one call and not on what of it is known
already, so that a run that is gone on with answers as one that was not cut short.
"""

from __future__ import annotations

import itertools
import logging
import operator
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from eval.lines import Line
from eval.lm_batches import Machine, generated, scored
from eval.lm_requests import Rules, Span, Text, Tokens, make_rules
from kvjax import CacheConfig, make_policy, prepare
from kvjax.types import Policy
from models import Loaded, load

_LOG = logging.getLogger(__name__)
_CHUNKS = (64, 128, 256, 512)


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

  Attributes:
    known: lines of answers that are there already, by the id of a request.
    keep: is given the lines of new answers (`eval.lm_batches`) as soon as they are there, with
      `compile_s`, the seconds that it had taken to compile.
    machine: the newest.

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
    self.known: Mapping[str, Line] = {}
    self.keep: Callable[[Sequence[Line]], None] = lambda fresh: None
    self.machine: Machine | None = None

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
    found = iter(
      self._loglikelihood_tokens(
        [(None, *window) for window in itertools.chain(*windows)], disable_tqdm
      )
    )
    sums = [sum(next(found)[0] for _ in one) for one in windows]
    for request, log_prob in zip(requests, sums, strict=True):
      self.cache_hook.add_partial("loglikelihood_rolling", request.args, log_prob)
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
    sharing: dict[Tokens, list[Span]] = {}  # a prompt -> what is to be scored behind it
    for span in dict.fromkeys(spans):
      sharing.setdefault(span.prompt, []).append(span)
    longest = {prompt: max(len(one.rest) for one in those) for prompt, those in sharing.items()}
    order = sorted(sharing, key=lambda prompt: (-len(prompt) - longest[prompt], prompt))
    batches = list(itertools.batched(order, self.batch_size))
    machine = self._prepare(
      [(max(map(len, batch)), max(longest[prompt] for prompt in batch)) for batch in batches]
    )
    found = self._answers(
      "loglikelihood",
      [(span.id, request) for span, (request, _, _) in zip(spans, requests, strict=True)],
      [[sharing[prompt] for prompt in batch] for batch in batches],
      scored,
      machine,
      disable_tqdm,
    )
    return [(found[span.id][0], found[span.id][1]) for span in spans]

  def _span(self, context: list[int], continuation: list[int]) -> Span:
    room = self.max_length + 1 - len(continuation)  # the last token is scored and not fed
    if room < 1:
      raise ValueError(
        f"a continuation has {len(continuation)} tokens, and max_length is {self.max_length}"
      )
    if len(context) > room:
      _LOG.warning("a context of %d tokens was cut from the left to %d", len(context), room)
    context = context[-room:]
    head = max(1, len(context) - 1)
    return Span(tuple(context[:head]), (*context[head:], *continuation), wanted=len(continuation))

  def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
    """Texts up to the first of the strings that end them, an end token, or the limit.

    What is sampled depends on the seed, on the context, and on how often it came before, not on the
    order of the requests otherwise.
    """
    if not requests:
      return []
    times = Counter[Tokens]()
    texts: list[Text] = []
    groups: dict[Rules, list[Text]] = {}
    for request in requests:
      rules = make_rules(request.args[1], self.max_gen_toks, self.tokenizer)
      prompt = self._prompt(request.args[0], rules.new_tokens)
      texts.append(Text(prompt, rules, self._row_seed(prompt, times)))
      groups.setdefault(rules, []).append(texts[-1])
    machine = self._prepare([(len(text.prompt), text.rules.new_tokens) for text in texts])
    batches = [
      batch
      for group in groups.values()
      for batch in itertools.batched(
        sorted(group, key=lambda text: (-len(text.prompt), text.prompt, text.seed)),
        self.batch_size,
      )
    ]
    found = self._answers(
      "generate_until",
      [(text.id, request.args) for text, request in zip(texts, requests, strict=True)],
      batches,
      generated,
      machine,
      disable_tqdm,
    )
    return [found[text.id] for text in texts]

  def _answers[Batch](
    self,
    kind: str,
    requests: Sequence[tuple[str, Any]],
    batches: Sequence[Batch],
    compute: Callable[[Machine, Batch, Collection[str]], Iterable[list[Line]]],
    machine: Machine,
    quiet: bool,
  ) -> dict[str, Any]:
    """Id -> answer, of what is known and of all else, which is computed and kept.

    Args:
      kind: the harness' name of such requests.
      requests: id and arguments, which the harness has a cache of its own for; None is not for it.
      batches: of all that is asked.
      compute: `scored` or `generated`.
      machine: what computes.
      quiet: shows no progress.
    """
    asked: dict[str, list[Any]] = {}
    for name, args in requests:
      asked.setdefault(name, []).append(args)
    found = {name: self.known[name]["answer"] for name in asked if name in self.known}
    left = len(asked) - len(found)
    with tqdm(total=left, disable=quiet, desc=f"kvjax {kind}") as bar:
      for batch in batches:
        for lines in compute(machine, batch, found):
          fresh = [line for line in lines if line["id"] not in found]
          compile_s = sum(machine.compile_s.values())
          self.keep([line | {"compile_s": compile_s} for line in fresh])
          for line in fresh:
            found[line["id"]] = answer = line["answer"]
            for args in filter(None, asked[line["id"]]):
              self.cache_hook.add_partial(kind, args, _for_harness(answer))
          bar.update(len(fresh))
    return found

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

  def _prepare(self, sizes: Iterable[tuple[int, int]]) -> Machine:
    """A runner for prompts and what follows them, of these sizes; capacities are powers of two, so
    that few are compiled."""
    prompts, rests = zip(*sizes, strict=True)
    capacity = 1 << max(6, (max(map(operator.add, prompts, rests)) - 1).bit_length())
    chunk = next((one for one in _CHUNKS if one >= max(prompts)), _CHUNKS[-1])
    dtype = jax.tree.leaves(self.loaded.params)[0].dtype.name
    config = CacheConfig(
      self.batch_size, capacity, self.page_size, dtype, base_tokens=min(capacity, 1024)
    )
    runner = prepare(self.loaded.model, self.policy, self.store, config, chunk_tokens=chunk)
    if self.machine is None or runner != self.machine.runner:
      self.machine = Machine(self.loaded, runner, {})
    return self.machine


def _for_harness(answer: Any) -> Any:
  return tuple(answer) if isinstance(answer, list) else answer


if __name__ == "__main__":
  from lm_eval.__main__ import cli_evaluate

  cli_evaluate()
