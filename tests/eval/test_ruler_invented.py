"""Problems whose text is invented: lines that look alike, and coded words."""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval import needle, ruler, ruler_lines, ruler_words, tasks
from models import tokenizer
from tests.models.test_tokenizer import CHATML, INFO, PATH

LINES = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "kv_retrieval")
NAMES = (*LINES, "frequent_words")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
SEEDS = st.integers(0, 2**32)
SIZES = st.integers(0, 300)


def _problem(name, seed=0, depth=0.3):
  return ruler.TASKS[name](random.Random(seed), [], depth)


def _hidden(text, kind="number", key=r"\S+", value=r"\d{7}"):
  return re.findall(rf"One of the special magic {kind}s for ({key}) is: ({value})\.", text)


@pytest.mark.parametrize("name", NAMES)
def test_a_longer_text_begins_with_nothing_new(name):
  """Sizes differ by what is added alone, so that the longest prompt that fits can be searched."""
  problem = _problem(name)
  short, long = (Counter(problem.haystack(size).split()) for size in (40, 90))
  first, last = "{", "}"  # of JSON, where they are part of another word
  extra = {word for word in short - long if first not in word and last not in word}
  assert extra == set() and long.total() > short.total()


@pytest.mark.parametrize("name", LINES)
@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, size=SIZES, depth=st.floats(0, 1))
def test_the_line_stands_at_its_depth(name, seed, size, depth):
  problem = _problem(name, seed, depth)
  lines = problem.haystack(size).strip().split("\n")
  (place,) = (index for index, line in enumerate(lines) if problem.references[0] in line)
  assert len(lines) == size + 1 and place == round(size * depth)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, size=SIZES)
def test_kv_retrieval_is_json_with_unique_keys(seed, size):
  problem = _problem("kv_retrieval", seed)
  pairs = json.loads(problem.haystack(size), object_pairs_hook=list)
  assert len(dict(pairs)) == len(pairs) == size + 1
  assert all(re.fullmatch(UUID, one) for pair in pairs for one in pair)
  key = re.fullmatch(rf'Key: "({UUID})"', problem.question)[1]
  assert problem.references == (dict(pairs)[key],)


def test_kv_retrieval_reads_as_the_original():
  problem = _problem("kv_retrieval", depth=1)
  (key,), (value,) = re.findall(UUID, problem.question), problem.references
  other, others = re.findall(UUID, problem.haystack(1))[:2]
  assert f"{problem.ask(1)}\n{problem.answer_prefix}" == (
    "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    f'JSON data:\n{{"{other}": "{others}",\n "{key}": "{value}"}}\n\n'
    f'Key: "{key}"\nCorresponding value:'
  )


def test_noise():
  problem = _problem("niah_single_1", depth=0.5)
  lines = problem.haystack(10).split("\n")
  ((key, value),) = _hidden(lines.pop(5))
  assert set(lines) == {ruler_lines._NOISE} and problem.references == (value,)
  assert problem.question == needle.QUESTION.format(key=key)
  assert problem.instruction == needle.INSTRUCTION


@settings(max_examples=10, deadline=None)
@given(seed=SEEDS)
def test_word_keys_are_unique(seed):
  problem = _problem("niah_multikey_2", seed)
  found = _hidden(problem.haystack(problem.largest))
  assert len(dict(found)) == len(found) == problem.largest + 1 == 144**2
  (asked,) = re.findall(r"number for (\S+) mentioned", problem.question)
  assert problem.references == (dict(found)[asked],)
  assert f"number for {asked} mentioned" in problem.answer_prefix


def test_uuids_for_uuids():
  """As `niah_multikey_3` of RULER: no word of it speaks of numbers."""
  problem = _problem("niah_multikey_3")
  text = problem.haystack(30)
  found = _hidden(text, "uuid", UUID, UUID)
  assert len(dict(found)) == len(found) == len(text.split("\n")) == 31
  (asked,) = re.findall(UUID, problem.question)
  assert problem.references == (dict(found)[asked],)
  assert problem.ask(0).startswith(
    "A special magic uuid is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the uuid afterwards.\nOne of the special magic uuids for "
  )
  assert (
    problem.question
    == f"What is the special magic uuid for {asked} mentioned in the provided text?"
  )
  assert problem.answer_prefix == (
    f"The special magic uuid for {asked} mentioned in the provided text is"
  )


def test_the_three_most_frequent_words_are_so():
  problem = _problem("frequent_words")
  for size in (*range(300), 1000, 5000):
    counts = Counter(problem.haystack(size).split()).most_common()
    assert counts[0][0] == "..." and [word for word, _ in counts[1:4]] == list(problem.references)
    assert len({count for _, count in counts[:5]}) == 5  # none of them as often as the next
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in counts[1:])


def test_counts_follow_the_zeta_law():
  """Shares of a zeta distribution of exponent 2: 6 / (pi k)^2."""
  counts = list(ruler_words._zeta_counts(100_000))
  assert counts[:4] == [60792, 15198, 6754, 3799] and counts[-1] >= 1
  assert len(counts) == 246 and sum(counts) == pytest.approx(99_500, rel=0.005)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_never_exceed_their_tokens(name):
  words = tokenizer.from_gguf(INFO | {"tokenizer.chat_template": CHATML}, PATH)
  for tokens in (1200, 1201, 2500):
    (one,) = tasks.make_examples([name], words, "One. Two.", tokens=tokens, num_samples=1)
    assert tokens - 200 < len(one.prompt_ids) <= tokens
    assert one == tasks.make_examples([name], words, "Else.", tokens=tokens, num_samples=1)[0]
  with pytest.raises(ValueError, match="has no room for the question"):
    tasks.make_examples([name], words, "One. Two.", tokens=200, num_samples=1)
