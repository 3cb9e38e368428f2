"""Carryover drafting: rejected rows' hidden states stay one more round as draft context (arXiv 2609.14717)."""
