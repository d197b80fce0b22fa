"""Tasks, metrics and the harness; run the commands as `python -m eval.run_NAME`."""
