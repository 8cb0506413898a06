"""The next token of one request, drawn so that it depends on that request alone.

A token is the arg max of ``logits + temperature * noise`` with Gumbel noise, which draws from
``softmax(logits / temperature)`` (Gumbel 1954; the "Gumbel-max trick"). At temperature 0 that is
greedy decoding. The noise of a request comes from a generator of its own, a fixed amount of it per
token, so neither the batch it shares nor the order of the requests changes what it is given. And a
choice is close exactly where the two best scores are, whatever the temperature.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request picks its tokens. Temperature 0 is greedy; ``top_k`` None keeps all."""

    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature is {self.temperature}; pass 0 for greedy decoding, or a positive "
                f"number that divides the logits"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(
                f"top_k is {self.top_k}, which leaves no token to pick; pass at least 1, or None "
                f"to keep all"
            )


GREEDY = SamplingParams()


class Sampler:
    """Turns the logits of one request into scores, the largest of which is the next token."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._generator = torch.Generator().manual_seed(params.seed)

    def score_(self, logits: Tensor) -> Tensor:
        """Write the scores over ``logits`` [vocab] and return them; one call per new token."""
        if self.params.temperature == 0:
            return logits
        if self.params.top_k is not None and self.params.top_k < logits.numel():
            least_kept = logits.topk(self.params.top_k).values[-1]
            logits.masked_fill_(logits < least_kept, float("-inf"))
        # Drawn on the host whatever the device, so that a seed means the same everywhere.
        uniform = torch.rand(logits.shape, generator=self._generator, dtype=torch.float64)
        gumbel = -(-uniform.clamp_min(torch.finfo(torch.float64).tiny).log()).log()
        return logits.add_(gumbel.to(logits.device, logits.dtype), alpha=self.params.temperature)
