"""What NVIDIA's kvpress calls the methods that are here too, so that its command lines work.

Two kinds of names: of its classes ("SnapKVPress") and of its evaluation's registry ("snapkv"). Only
methods of the same paper are taken; options, defaults and budgets (tokens, not a share of the
prompt) stay ours. What else differs, as of kvpress in August 2026: a press drops tokens once, after
the prompt, where `streaming`, `h2o` and `tova` go on dropping while they generate;
StreamingLLMPress leaves keys at the positions of the text, `streaming` counts positions inside the
cache, as the paper does; ObservedAttentionPress takes means of attention and keeps no recent
window, `h2o` takes sums and keeps one, as its paper does; SnapKVPress and PyramidKVPress look at
the last 64 tokens unless told otherwise, here at the last 32.
"""

from __future__ import annotations

KVPRESS = {
  "DuoAttentionPress": "duo",
  "ObservedAttentionPress": "h2o",
  "PyramidKVPress": "pyramidkv",
  "SnapKVPress": "snapkv",
  "StreamingLLMPress": "streaming",
  "TOVAPress": "tova",
  "duo_attention": "duo",
  "no_press": "dense",
  "observed_attention": "h2o",
  "streaming_llm": "streaming",
}
"""kvpress' name -> ours, where they differ; snapkv, pyramidkv and tova are the same in both."""
