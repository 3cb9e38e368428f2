"""``python -m sglang_ext.demo``: the real server on the reference models, one method after the other, in one table."""
