"""Speculative decoding for SGLang that drafts from states the target model has already computed."""

__version__ = "0.1.0"
