"""Sampling whose result for one document depends on that document's seed alone, not on the batch it is in."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor


def uniform_noise(seeds: Tensor, step: int, size: int) -> Tensor:
    """Uniform numbers in (0, 1), [B, ``size``] fp32: a hash of (seed, step, column), the same on every device.

    ``seeds`` [B] int64. Two rounds of multiply and xor-shift over 64-bit integers (the finaliser of SplitMix64, Steele,
    Lea and Flood, OOPSLA 2014); torch's int64 wraps around as that needs.
    """
    state = (seeds[:, None] * 0x2545F4914F6CDD1D + step) * 0x1B873593CC9E2D51 + torch.arange(size, device=seeds.device)
    for multiplier in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
        # int64 shifts keep the sign; the mask makes the shift a logical one.
        state = (state ^ ((state >> 30) & ((1 << 34) - 1))) * multiplier
    # The upper 23 bits and a half: exact in fp32, never 0 or 1.
    return (((state >> 41) & ((1 << 23) - 1)).float() + 0.5) / (1 << 23)


class SeededTemperature(LogitsProcessor):
    """Adds Gumbel noise times the temperature, so that the argmax is a sample at that temperature; 0 stays greedy.

    ``seeds`` [B] int64 and ``temperatures`` [B] are per row; ``prompt_width`` is the width of the (padded) prompts.
    Use with ``generate(do_sample=False)``.
    """

    def __init__(self, seeds: Tensor, temperatures: Tensor, prompt_width: int) -> None:
        self.seeds, self.temperatures, self.prompt_width = seeds, temperatures, prompt_width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Perturbed scores [B, V]."""
        uniform = uniform_noise(self.seeds, input_ids.shape[1] - self.prompt_width, scores.shape[1])
        return scores.float() - self.temperatures[:, None] * torch.log(-torch.log(uniform))
