"""Load test for OpenAI-compatible servers that decode speculatively, on Locust.

Nothing here imports SGLang or torch: the load generator runs anywhere. It uses the pure arithmetic of
``sglang_ext.evaluation`` (acceptance figures, resampling).
"""
