"""Subcommands of ``sglang-ext`` that read, make and serve checkpoints."""
