"""Traces in four formats, the generator's numbers, and statistics against brute force."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest

from kvjax.sim import trace_statistics, workloads
from kvjax.sim.generator import CONTROL, INTERACTIVE, generate
from kvjax.sim.traces import read_trace
from kvjax.sim.workloads import Turn, from_turns

MOONCAKE = Path(__file__).resolve().parents[3] / "shared/data/traces/mooncake"

# Hand-written; every format tells of users 7 and 9, but for Azure's, which knows no users.
INTERACTIVE_TEXT = """user_id time_stamp(seconds) query_length response_length round_index
7 100 10 4 0
9 101 3 0 0
7 160 6 8 1

7 160 2 2 2
"""
AZURE_TEXT = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:16:46.6805900,91,16
"""
# 2 continues 0 and holds all it had; 3 shares two blocks with 2 only; 4 shares the system prompt.
MOONCAKE_TEXT = """
{"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]}
{"timestamp": 500, "input_length": 600, "output_length": 5, "hash_ids": [0, 3]}
{"timestamp": 9000, "input_length": 1300, "output_length": 7, "hash_ids": [0, 1, 4]}
{"timestamp": 9500, "input_length": 1200, "output_length": 9, "hash_ids": [0, 1, 5]}
{"timestamp": 9600, "input_length": 700, "output_length": 1, "hash_ids": [0, 6]}
"""
_CHAT = '{{"chat_id": {}, "parent_chat_id": {}, "timestamp": {}, "input_length": {}, '
_CHAT += '"output_length": {}, "type": "text", "turn": 1, "hash_ids": {}}}\n'
# 31 continues 30; 33 shares two of 31's blocks only; 40's parent is not in the file.
BAILIAN_TEXT = "".join(
  _CHAT.format(*line)
  for line in (
    (30, -1, 0.5, 40, 10, [1, 2, 3]),
    (40, 12, 0.6, 20, 5, [8, 9]),
    (31, 30, 20.25, 70, 6, [1, 2, 4, 5, 6]),
    (33, 31, 90, 60, 2, [1, 2, 7, 8]),
  )
)


def _read(folder, text, name="trace.txt"):
  (folder / name).write_text(text, encoding="utf-8")
  return read_trace(folder / name)


@pytest.mark.parametrize(
  ("text", "turns"),
  [
    (
      INTERACTIVE_TEXT,
      [(7, 100, 10, 4, 0), (9, 101, 3, 0, 0), (7, 160, 6, 8, 14), (7, 160, 2, 2, 28)],
    ),
    (AZURE_TEXT, [(0, 0, 374, 44, 0), (1, 60, 91, 16, 0)]),
    (
      MOONCAKE_TEXT.lstrip(),
      [
        (0, 0, 1100, 50, 0),
        (1, 0.5, 600, 5, 0),
        (0, 9, 150, 7, 1150),
        (0, 9.5, 1200 - 1024, 9, 1024),
        (4, 9.6, 700, 1, 0),
      ],
    ),
    (
      BAILIAN_TEXT,
      [(30, 0.5, 40, 10, 0), (40, 0.6, 20, 5, 0), (30, 20.25, 20, 6, 50), (30, 90, 28, 2, 32)],
    ),
  ],
  ids=["interactive", "azure", "mooncake", "bailian"],
)
def test_a_trace_of_each_format(tmp_path, text, turns):
  workload = _read(tmp_path, text)
  assert [*workload] == [Turn(*turn) for turn in turns]
  assert workload.name == "trace.txt" and workload.backwards == 0
  windows = _read(tmp_path, "\ufeff" + text.replace("\n", "\r\n"), "windows.txt")
  assert [*windows] == [*workload]


def test_a_prompt_that_is_all_known_still_asks_something(tmp_path):
  line = '{"timestamp": 0, "input_length": 1024, "output_length": 9, "hash_ids": [0, 1]}\n'
  again = _read(tmp_path, 2 * line)
  assert [(turn.query_tokens, turn.history_tokens) for turn in again] == [(1024, 0), (1, 1023)]


@pytest.mark.parametrize(
  ("text", "complaint"),
  [
    ("hello\n", r"trace.txt is no known trace: it begins with 'hello'; expected a header 'user_id"),
    ("", "no known trace: it begins with ''; expected"),
    ("{}\n", "no known trace"),
    (INTERACTIVE_TEXT.splitlines()[0], "trace.txt has no requests; expected at least one"),
    (INTERACTIVE_TEXT + "7 200 1\n", "trace.txt:7 has 3 fields; expected user_id time_stamp"),
    (INTERACTIVE_TEXT + "7 x 1 1 3\n", "trace.txt:7: time_stamp is 'x'; expected a number"),
    (INTERACTIVE_TEXT + "7 inf 1 1 3\n", "time_stamp is 'inf'; expected a number"),
    (INTERACTIVE_TEXT + "7 1 0 1 3\n", "query_length is '0'; expected a whole number of 1 or more"),
    (INTERACTIVE_TEXT + "7 1 1 -1 3\n", "response_length is '-1'; expected a whole number of 0 "),
    (
      AZURE_TEXT + "yesterday,1,1\n",
      "txt:4: TIMESTAMP is 'yesterday'; expected one like 2023-11-1",
    ),
    (AZURE_TEXT + "2023-11-16T18:15:46+01:00,1,1\n", "TIMESTAMP is '2023-11-16T18:15:46\\+01:00'"),
    (AZURE_TEXT + "1,1\n", "trace.txt:4 has 2 fields; expected TIMESTAMP,ContextTokens"),
    (BAILIAN_TEXT + "{\n", "trace.txt:5 is not JSON .*; expected one object a line"),
    (BAILIAN_TEXT + "[1]\n", "trace.txt:5 is a JSON list; expected an object"),
    (BAILIAN_TEXT + _CHAT.format("null", 1, 1, 1, 1, []), "chat_id is None; expected a whole"),
    (BAILIAN_TEXT + _CHAT.format(1, -1, 1, 1.5, 1, []), "input_length is 1.5; expected a whole"),
    (BAILIAN_TEXT + _CHAT.format(1, -1, 1, 1, 1, 3), "hash_ids is 3; expected a list of whole num"),
    (BAILIAN_TEXT + _CHAT.format(1, -1, 1, 1, 1, '["a"]'), "hash_ids is 'a'; expected a whole"),
    (MOONCAKE_TEXT.lstrip() + '{"hash_ids": []}', "trace.txt:6: input_length is None; expected"),
  ],
)
def test_a_broken_trace_is_one_line(tmp_path, text, complaint):
  with pytest.raises(ValueError, match=complaint) as error:
    _read(tmp_path, text)
  assert "\n" not in str(error.value)


def test_what_is_no_text_is_refused(tmp_path):
  (tmp_path / "zip").write_bytes(b"PK\xff\xfe\x00")
  with pytest.raises(ValueError, match="zip is not text; expected a header"):
    read_trace(tmp_path / "zip")


def test_a_clock_that_goes_backwards_keeps_the_order_of_the_file(tmp_path):
  text = INTERACTIVE_TEXT + "9 90 5 5 1\n9 159 6 6 2\n7 200 1 1 3\n"
  workload = _read(tmp_path, text)
  assert workload.arrival_s.tolist() == [100, 101, 160, 160, 160, 160, 200]
  assert workload.backwards == 2 and len(workload) == 7
  assert workload.history_tokens.tolist()[4:] == [3, 13, 32]


@pytest.mark.skipif(not MOONCAKE.is_dir(), reason=f"needs {MOONCAKE}")
def test_the_mooncake_trace():
  """Against the turns that were derived from it apart from this code."""
  workload = read_trace(MOONCAKE / "conversation_trace.jsonl")
  lines = (MOONCAKE / "conversation_turns.csv").read_text(encoding="utf-8").splitlines()[1:]
  derived = np.array([line.split(",") for line in lines], np.int64)
  assert workload.user.tolist() == derived[:, 2].tolist()
  assert (workload.total_tokens == derived[:, 5] + derived[:, 6]).all()
  continues = derived[:, 4] >= 0
  assert ((workload.history_tokens > 0) == continues).all() and continues.sum() == 4658
  whole = derived[derived[continues, 4], 5:7].sum(axis=1)
  longer, prompts = workload.history_tokens[continues] == whole, derived[continues, 5]
  assert longer[prompts > whole].all() and (prompts >= whole).sum() == 3792


@pytest.fixture(scope="module")
def made():
  return {one.name: generate(one, 3000, 30, seed=3) for one in (INTERACTIVE, CONTROL)}


def test_the_same_seed_makes_the_same_conversations():
  first, same, other = (generate(INTERACTIVE, 50, 20, seed) for seed in (1, 1, 2))
  assert [*first] == [*same] != [*other]


@pytest.mark.parametrize("name", ["interactive", "control"])
def test_what_is_made_is_a_conversation(made, name):
  workload = made[name]
  assert (np.diff(workload.arrival_s) >= 0).all() and workload.arrival_s[0] >= 0
  held: dict[int, int] = {}
  for turn in workload:
    assert turn.history_tokens == held.get(turn.user, 0)
    assert turn.query_tokens >= 1 and turn.answer_tokens >= 1
    held[turn.user] = turn.history_tokens + turn.query_tokens + turn.answer_tokens
  assert len(held) == 3000


def test_the_numbers_of_the_interactive_workload(made):
  """Within 5 %, or 10 % for what is far from the middle, of what Bidaw's public trace has."""
  workload = made["interactive"]
  turns = trace_statistics.turns_by_user(workload)
  continued = workload.previous >= 0
  gaps = (workload.arrival_s - workload.arrival_s[workload.previous])[continued]
  pauses = gaps - workload.answer_tokens[workload.previous][continued] / 1.67
  for value, expected in (
    (turns.mean(), 22.4),
    (np.median(turns), 18),
    (workload.query_tokens.mean(), 35.3),
    (np.median(workload.query_tokens), 26),
    (workload.answer_tokens.mean(), 45),
    (np.median(workload.answer_tokens), 38),
    (gaps.mean(), 48.7),
    (np.median(gaps), 43),
    (np.median(pauses), 14),
    (workloads.users_per_minute(workload), 30),
  ):
    assert value == pytest.approx(expected, rel=0.05)
  for values, share, expected in (
    (turns, 90, 45),
    (workload.query_tokens, 90, 77),
    (workload.answer_tokens, 90, 84),
    (gaps, 5, 13),
    (gaps, 95, 104),
    (pauses, 95, 60),
  ):
    assert np.percentile(values, share) == pytest.approx(expected, rel=0.12)


def test_the_numbers_of_the_control(made):
  workload = made["control"]
  gaps = (workload.arrival_s - workload.arrival_s[workload.previous])[workload.previous >= 0]
  for value, expected in (
    (trace_statistics.turns_by_user(workload).mean(), 5.7),
    (workload.query_tokens.mean(), 161),
    (workload.answer_tokens.mean(), 338),
    (gaps.mean(), 48),
    (gaps.std(), 48),
  ):
    assert value == pytest.approx(expected, rel=0.05)


def test_answers_tell_of_returns_in_the_one_and_not_in_the_other(made):
  """The mean over eight parts, each with a correlation of 20 points."""
  bounds = {}
  for name, workload in made.items():
    distances = trace_statistics.reuse_distances(workload, 2048)
    answers = trace_statistics.answers_before(workload)
    known = ~np.isnan(distances)
    answers, distances = answers[known], distances[known]
    parts = [trace_statistics.by_group(answers[n::8], distances[n::8]) for n in range(8)]
    bounds[name] = [part.spearman for part in parts]
    plain = trace_statistics.spearman(answers, distances)
    assert plain > 0.5 if name == "interactive" else abs(plain) < 0.03
    if name == "interactive":
      assert trace_statistics.by_group(answers, distances).spearman > 0.94
  assert np.mean(bounds["interactive"]) > 0.8
  assert abs(np.mean(bounds["control"])) < 0.25  # the deviation of this mean is 0.08


def _turns(rng, users=12, count=300):
  held: dict[int, int] = {}
  time = 0.0
  for _ in range(count):
    user, query, answer = rng.randrange(users), rng.randint(1, 90), rng.randrange(60)
    history = held.get(user, 0)
    held[user] = history + query + answer
    time += rng.choice([0, 0.5, 3])
    yield Turn(user, time, query, answer, history)


@pytest.mark.parametrize("max_tokens", [None, 900])
def test_reuse_distances_by_brute_force(max_tokens):
  turns = [*_turns(random.Random(0))]
  found = trace_statistics.reuse_distances(from_turns("x", turns), max_tokens)
  for now, turn in enumerate(turns):
    others: dict[int, int] = {}
    for before in range(now - 1, -1, -1):
      one = turns[before]
      if one.user == turn.user:
        assert found[now] == sum(others.values())
        break
      size = one.history_tokens + one.query_tokens + one.answer_tokens
      others.setdefault(one.user, min(size, max_tokens or math.inf))
    else:
      assert np.isnan(found[now])


def test_counts_by_brute_force():
  turns = [*_turns(random.Random(1))]
  workload = from_turns("x", turns)
  mine = {user: [turn for turn in turns if turn.user == user] for user in range(12)}
  assert trace_statistics.turns_by_user(workload).tolist() == [len(mine[u]) for u in range(12)]
  assert trace_statistics.durations_s(workload).tolist() == [
    mine[user][-1].arrival_s - mine[user][0].arrival_s for user in range(12)
  ]
  before = trace_statistics.answers_before(workload)
  held = trace_statistics.under_way_tokens(workload)
  for now, turn in enumerate(turns):
    earlier = [one for one in turns[:now] if one.user == turn.user]
    assert np.isnan(before[now]) if not earlier else before[now] == earlier[-1].answer_tokens
    latest = {one.user: one for one in turns[: now + 1]}
    going = (u for u in latest if latest[u] is not mine[u][-1] or latest[u] is turn)
    assert held[now] == sum(sum(latest[u][2:]) for u in going)


def test_lower_bounds_by_hand():
  """An outlier far below the others of its length is left out; nan never comes in."""
  answers = np.array([2.0] * 9 + [4.0] * 3 + [6.0])
  distances = np.array([50, 51, 52, 53, 54, 55, 56, 57, 1, 9, 8, 70, 30.0])
  bounds = trace_statistics.by_length(answers, distances)
  assert bounds.answer_tokens.tolist() == [2, 4, 6]
  assert bounds.distance_tokens.tolist() == [50, 8, 30]
  assert bounds.spearman == pytest.approx(-0.5)
  groups = trace_statistics.by_group(answers, distances, groups=3, percentile=0)
  assert groups.answer_tokens.tolist() == [2, 2, 4.5]
  assert groups.distance_tokens.tolist() == [50, 1, 8]
  assert trace_statistics.by_group(answers[:2], distances[:2]).spearman is None
  assert trace_statistics.spearman([1, 1, 1], [1, 2, 3]) is None


def test_a_lower_rate_is_fewer_users_with_all_their_turns(made):
  workload = made["interactive"]
  fewer = workloads.sample_users(workload, 10, seed=0)
  assert workloads.users_per_minute(fewer) == pytest.approx(10, rel=0.05)
  chosen = {turn.user for turn in fewer}
  assert [*fewer] == [turn for turn in workload if turn.user in chosen]
  assert {turn.user for turn in workloads.sample_users(workload, 10, seed=1)} != chosen
  with pytest.raises(
    ValueError, match=r"^60 users a minute are wanted, and of interactive 30.* beg"
  ):
    workloads.sample_users(workload, 60, seed=0)
  with pytest.raises(ValueError, match=r"0\.001 users a minute leave 0 of 3000 conversations"):
    workloads.sample_users(workload, 0.001, seed=0)
  alone = from_turns("one", [Turn(0, 5.0, 1, 1, 0)])
  with pytest.raises(ValueError, match="of one all begin at once; expected a rate"):
    workloads.sample_users(alone, 1, seed=0)


def test_requests_of_a_workload():
  turns = [Turn(5, 1.0, 30, 0, 0), Turn(6, 2.0, 900, 900, 70), Turn(5, 3.0, 10, 20, 30)]
  workload = from_turns("x", turns)
  first, second, third = workloads.requests(workload)
  assert [one.id for one in (first, second, third)] == [0, 1, 2]
  assert (first.user, first.arrival_s, len(first.prompt), first.max_new_tokens) == (5, 1.0, 30, 1)
  assert (len(second.prompt), second.max_new_tokens) == (900, 900)
  assert (third.user, len(third.prompt), third.max_new_tokens) == (5, 10, 20)
  _, cut, same = workloads.requests(workload, max_tokens=1000)
  assert (len(cut.prompt), cut.max_new_tokens) == (500, 500) and same == third


def test_no_workload():
  for users, rate in ((0, 10), (5, 0), (5, math.inf), (5, math.nan)):
    with pytest.raises(
      ValueError, match=f"{users} users at .* a minute make no workload; expected"
    ):
      generate(INTERACTIVE, users, rate, seed=0)
