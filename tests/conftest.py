"""The strict suite: no implicit rank or dtype promotion, no network, no files of the user.

Tests that are marked slow may use the network and the user's cache of models. A test that needs
looser arithmetic says so with `with jax.numpy_dtype_promotion("standard")`.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import signal
import socket
import tempfile
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported; subprocesses inherit it
os.environ.setdefault("MPLBACKEND", "agg")
# Tests compile far more than they compute, and two workers have a core each.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_parallel_codegen_split_count=1")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# What one file, worker or command of a run has compiled, the others load. The first process of the
# run makes the folder and takes it away.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
  os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="kvjax-tests-")
  atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# A job that runs in the background ignores interrupts, and so would the commands that tests
# interrupt: what is ignored is inherited, a handler is not.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Files that take over half a minute, the longest first: workers that get whole files in this order
# end together. The others take a few seconds each and come last.
_LONG = (
  *("test_laws", "test_window", "test_sharded", "test_laws_compiled", "test_golden_families"),
  *("test_host_stores", "test_head_tiered", "test_batching", "test_reproduce_opkv"),
  *("test_run_needle", "test_eviction", "test_notebooks", "test_gpu_check", "test_page_scores"),
  *("test_write_a_policy", "test_small", "test_omnikv", "test_evicting", "test_quickstart"),
  *("test_clusterkv", "test_infinigen", "test_snapkv", "test_profiling", "test_streaming"),
  *("test_page_policies", "test_int8_digests", "test_throughput", "test_unstable_heads"),
  *("test_train_small", "test_replay", "test_run_perplexity", "test_golden", "test_attention"),
  *("test_pages", "test_families", "test_generate", "test_readme", "test_inspect_model"),
  *("test_h100", "test_mosaic_attention", "test_mosaic_ranking", "test_mosaic_pages", "test_races"),
  *("test_sub_block_manager", "test_h100_attention", "test_project_qkv_to_pages"),
  *("test_paged_attention", "test_profile_policy", "test_quest", "test_sampling"),
  *("test_decoder", "test_duo", "test_profile_heads", "test_layering"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]):
  """Long files first."""
  rank = {name: place for place, name in enumerate(_LONG)}
  items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


@pytest.fixture
def fully_optimized():
  """What the test compiles is as users' is: to look at it, or to compute with it for long."""
  jax.config.update("jax_disable_most_optimizations", False)
  yield
  jax.config.update("jax_disable_most_optimizations", True)


# Every compiled program is mapped into memory in several pieces, of which Linux allows a process
# 65,530; beyond them XLA crashes. To count them takes long: after every tenth test.
_MOST_MAPS = 40_000
_teardowns = itertools.count()


def _maps() -> int:
  try:
    with open("/proc/self/maps", "rb") as file:
      return sum(1 for _ in file)
  except OSError:  # not Linux
    return 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item):
  """Forgets compiled programs before there are too many of them."""
  del item
  if next(_teardowns) % 10 == 0 and _maps() > _MOST_MAPS:
    jax.clear_caches()


def _connect_locally(self: socket.socket, address, _connect=socket.socket.connect):
  if self.family in (socket.AF_INET, socket.AF_INET6):
    raise OSError(f"a test that is not marked slow tried to connect to {address}")
  return _connect(self, address)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
  """Takes the network away, from fixtures of every scope too, unless the test is marked slow."""
  if item.get_closest_marker("slow"):
    return (yield)
  with mock.patch.object(socket.socket, "connect", _connect_locally):
    return (yield)


@pytest.fixture(autouse=True)
def _own_cache(request, monkeypatch, tmp_path_factory):
  """Fetched files and stamps of a test go to a folder of its own, unless it is marked slow."""
  if not request.node.get_closest_marker("slow"):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path_factory.mktemp("cache")))
