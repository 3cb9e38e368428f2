"""Prometheus series of speculative decoding, created in the scheduler process and shown on SGLang's own /metrics.

``scheduler`` hooks into a built scheduler, ``rounds`` adds up what its rounds did (plain Python), ``series`` holds the
Prometheus objects, ``contract`` what the server says it runs. Nothing here touches a tensor: all figures are host
integers that SGLang has already copied.
"""
