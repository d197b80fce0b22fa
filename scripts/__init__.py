"""Commands; run them as `python -m scripts.NAME`."""
