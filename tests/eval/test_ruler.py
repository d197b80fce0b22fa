"""Problems and examples: where the facts lie, what is asked, how long a prompt is, what counts."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import re
import string

import pytest

from eval import needle, recall, ruler, tasks
from models import tokenizer
from tests.models.test_tokenizer import CHATML, INFO, PATH

_RNG = random.Random(3)
_WORDS = ["".join(_RNG.choices(string.ascii_lowercase, k=6)) for _ in range(900)]
TEXT = " ".join(f"Number {n} {' '.join(_RNG.sample(_WORDS, 6))}." for n in range(600))
SENTENCES = needle.split_sentences(TEXT)


@pytest.fixture(scope="module")
def words():
  return tokenizer.from_gguf(INFO | {"tokenizer.chat_template": CHATML}, PATH)


@pytest.fixture(scope="module")
def plain_words(words):
  return dataclasses.replace(words, chat_template=None)


def _problem(name, seed=0, depth=0.3):
  return ruler.TASKS[name](random.Random(seed), SENTENCES, depth)


def _hidden(haystack):
  """key -> numbers."""
  found = collections.defaultdict(list)
  pattern = r"One of the special magic numbers for (\S+) is: (\d+)\."
  for key, value in re.findall(pattern, haystack):
    found[key].append(value)
  return found


@pytest.mark.parametrize("name", list(ruler.TASKS))
def test_the_text_holds_what_is_asked_for(name):
  problem = _problem(name)
  for size in (0, 80, 200):
    text = problem.haystack(size)
    assert all(reference in text for reference in problem.references)
  assert len(set(problem.references)) == len(problem.references)
  lengths = [len(problem.ask(size)) for size in range(0, min(problem.largest, 700), 7)]
  assert lengths == sorted(lengths) and len(set(lengths)) > 20


@pytest.mark.parametrize("name", list(ruler.TASKS))
def test_seeds(name):
  def asked(seed):
    problem = _problem(name, seed)
    return problem.ask(50), problem.references

  assert asked(1) == asked(1) != asked(2)


def test_single():
  problem = _problem("niah_single", depth=0.25)
  text = problem.haystack(400)
  ((key, values),) = _hidden(text).items()
  assert key in problem.question and key in problem.answer_prefix
  assert tuple(values) == problem.references and len(values[0]) == 7
  assert text.index(key) / len(text) == pytest.approx(0.25, abs=0.01)


def test_one_of_many_keys():
  problem = _problem("niah_multikey", depth=0.25)
  text = problem.haystack(400)
  hidden = _hidden(text)
  assert len(hidden) == 4 and all(len(values) == 1 for values in hidden.values())
  assert len({word for key in hidden for word in key.split("-")}) == 8
  (asked,) = (key for key in hidden if key in problem.question)
  assert tuple(hidden[asked]) == problem.references
  assert text.index(asked) / len(text) == pytest.approx(0.25, abs=0.02)


def test_all_values_of_one_key():
  problem = _problem("niah_multivalue")
  ((key, values),) = _hidden(problem.haystack(400)).items()
  assert key in problem.question
  assert sorted(values) == sorted(problem.references) and len(values) == 4


def test_all_keys():
  problem = _problem("niah_multiquery")
  hidden = _hidden(problem.haystack(400))
  assert len(hidden) == 4 and all(key in problem.question for key in hidden)
  assert sorted(itertools.chain(*hidden.values())) == sorted(problem.references)


def test_variables():
  problem = _problem("variable_tracking")
  assigned = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", problem.haystack(300))
  (value,) = re.findall(r"the value (\d+) in", problem.question)
  assert [name for name, _ in assigned] == list(problem.references)
  assert [source for _, source in assigned] == [value, *problem.references[:-1]]
  assert "5 variables are assigned the value" in problem.answer_prefix


def test_common_words_are_the_most_common():
  problem = _problem("common_words")
  for size in (0, 5, 60, 300, problem.largest):
    listed = re.findall(r"\d+\. (\w+)", problem.haystack(size))
    counts = collections.Counter(listed)
    assert {word for word, _ in counts.most_common(10)} == set(problem.references)
    common, rare = counts[problem.references[0]], set(counts.values()) - {30}
    assert {counts[word] for word in problem.references} == {common}
    assert common >= 6 and (size == 0 or 3 in rare)
  assert common == 30


def test_a_chain_leads_through_all_of_its_keys():
  problem = _problem("pointer_chain")
  text = problem.haystack(400)
  links = dict(re.findall(ruler.CHAIN_FACT.format(key=r"(\d+)", next=r"(\d+)"), text))
  (key,) = re.findall(r"for (\d+) is:$", problem.answer_prefix)
  (start,) = re.findall(r"Start at (\d+)\.", problem.question)
  assert links[links[start]] == key and problem.answer_prefix.count("\n") == ruler.GIVEN == 2
  walked = []
  while key in links:
    walked.append(key := links[key])
  assert tuple(walked) == problem.references and len(walked) == ruler.HOPS


def test_the_next_fact_is_elsewhere():
  for seed in range(20):
    problem = _problem("pointer_chain", seed)
    text = problem.haystack(400)
    places = [text.index(f"is: {key}.") for key in problem.references]
    gaps = [abs(a - b) / len(text) for a, b in itertools.pairwise(places)]
    assert min(gaps) > 1.5 / (ruler.HOPS + ruler.GIVEN)
    assert sum(a > b for a, b in itertools.pairwise(places)) >= 2  # back and forth


@pytest.mark.parametrize("name", list(ruler.TASKS))
def test_prompts_are_as_long_as_they_can_be(words, name):
  examples = tasks.make_examples([name], words, TEXT, tokens=4000, num_samples=2)
  assert [one.task for one in examples] == [name] * 2
  for one in examples:
    assert 3700 < len(one.prompt_ids) <= 4000
    prompt = words.decode(one.prompt_ids, skip_special=False)
    assert prompt.startswith("<|im_start|>user\n") and "<|im_start|>assistant\n" in prompt
    assert all(reference in prompt for reference in one.references)
    tail = words.decode(one.prompt_ids[-one.question_tokens :], skip_special=False)
    assert tail.startswith(("What", "Question", "Start", "Key")) and tail.count("<|im_end|>") == 1
    assert "assistant" not in tail.partition("<|im_end|>")[0]
    assert one.new_tokens >= len(words.encode(" ".join(one.references)))


def test_examples_have_different_pieces_of_the_text_and_depths(plain_words):
  examples = tasks.make_examples(["niah_single"], plain_words, TEXT, tokens=3000, num_samples=4)
  prompts = [plain_words.decode(one.prompt_ids) for one in examples]
  numbers = [re.search(r"Number (\d+)", prompt)[1] for prompt in prompts]
  assert len(set(numbers)) == 4
  answers = [one.references[0] for one in examples]
  depths = [prompt.index(a) / len(prompt) for prompt, a in zip(prompts, answers, strict=True)]
  assert depths == pytest.approx([0.125, 0.375, 0.625, 0.875], abs=0.15)


def test_examples_do_not_depend_on_the_other_tasks(plain_words):
  def made(names):
    return tasks.make_examples(names, plain_words, TEXT, tokens=2500, num_samples=1, seed=5)[-1]

  assert made(["pointer_chain"]) == made(["niah_single", "lookup", "pointer_chain"])


def test_the_first_examples_are_the_same_as_among_all(plain_words):
  def made(limit):
    names, options = ["lookup", "chain"], {"tokens": 1500, "num_samples": 3}
    return tasks.make_examples(names, plain_words, TEXT, **options, limit=limit)

  assert made(1) == made(None)[::3] and made(9) == made(None)


@pytest.mark.parametrize("name", list(recall.TASKS))
def test_tasks_of_the_small_models(plain_words, name):
  for one in tasks.make_examples([name], plain_words, TEXT, tokens=1500, num_samples=2):
    prompt = plain_words.decode(one.prompt_ids)
    answer = ">".join(one.references)
    assert len(prompt) + len(answer) == 1500
    assert one.new_tokens == len(answer) == len(plain_words.encode(answer))  # bytes: no merges
    question = prompt.rpartition("\n")[2]
    assert one.question_tokens == len(plain_words.encode(question))
    assert all(reference in prompt for reference in one.references)


def test_score():
  assert tasks.score("niah_single", "it is ab12.", ("AB12", "cd")) == 0.5
  assert tasks.score("niah_single", "CDab12", ("AB12", "cd")) == 1.0
  assert tasks.score("lookup", "4 711", ("4711",)) == 0.0
  assert tasks.metric("niah_single") == tasks.metric("lookup") == "string_match_all"
  for unknown in (tasks.metric, lambda task: tasks.score(task, "a", ("a",))):
    with pytest.raises(ValueError, match="unknown task 'niah'"):
      unknown("niah")


def test_bad_input(words):
  def make(names, text=TEXT, tokens=3000):
    return tasks.make_examples(names, words, text, tokens=tokens, num_samples=1)

  with pytest.raises(ValueError, match="unknown task 'niah', expected some of niah_single"):
    make(["niah"])
  with pytest.raises(ValueError, match="the text is too short"):
    make(["niah_single"], text="One. Two.")
  with pytest.raises(ValueError, match="has 4 different words for task common_words"):
    make(["common_words"], text="Some words stand here alone. " * 10)
  with pytest.raises(ValueError, match="has no room for the question"):
    make(["variable_tracking"], tokens=100)
