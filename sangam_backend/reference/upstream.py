"""What the published samplers do beyond the served rules, with torch's own random numbers.

Only parity tests use it: to show that the loop is the published one, draw for draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Categorical

from sangam_backend import rules
from sangam_backend.models.transformer import Transformer
from sangam_backend.reference.loop import Predictor
from sangam_backend.reference.sampler import Sampler, View


class GuidedPredictor(Predictor):
    """LLaDA's classifier-free guidance: the prompt masked against the prompt seen."""

    def __init__(self, model: Transformer, length: int, prompt_length: int, scale: float) -> None:
        super().__init__(model, length)
        self.prompt_length = prompt_length
        self.scale = scale

    def predict(self, x: Tensor, start: int, end: int) -> Tensor:
        blind = x.clone()
        blind[: self.prompt_length] = self.model.config.mask_token_id
        conditional, unconditional = (
            super(GuidedPredictor, self).predict(y, start, end) for y in (x, blind)
        )
        return unconditional + (self.scale + 1) * (conditional - unconditional)


@dataclass(frozen=True, slots=True)
class LLaDASampler:
    """LLaDA's fixed quotas with Gumbel noise, as in LLaDA and Fast-dLLM."""

    temperature: float
    steps_per_block: int
    random_remasking: torch.dtype | None
    """The dtype of the confidences drawn; None ranks by probability."""
    unranked_ids: tuple[int, ...]
    """Tokens that count for nothing in confidences once the proposals are made."""
    draws: int
    """How often the noise of a block's later forwards is drawn; the last one counts."""

    def choose(self, view: View) -> tuple[Tensor, Tensor]:
        logits = view.logits.double()
        noisy = logits
        if self.temperature > 0:
            for _ in range(self.draws if view.forward_in_block else 1):
                u = torch.rand(logits.shape, dtype=torch.float64)
            noisy = logits.exp() / (-u.log()) ** self.temperature
        tokens = noisy.argmax(-1)
        logits = logits.clone()
        logits[:, list(self.unranked_ids)] = -math.inf
        confidence = logits.softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
        if self.random_remasking is not None:
            confidence = torch.rand(len(confidence), dtype=self.random_remasking).double()
        block = slice(view.block_start - view.window_start, view.block_end - view.window_start)
        quota = rules.llada_quota(len(view.masked), self.steps_per_block, view.forward_in_block)
        return tokens[block], _best(confidence[block], view.masked, quota)


@dataclass(slots=True)
class DreamSampler:
    """Dream's schedules and Fast-dLLM's capped threshold for it."""

    temperature: float
    top_p: float
    top_k: int
    algorithm: str
    """origin, maskgit_plus, topk_margin, entropy, or capped_threshold."""
    steps: int
    eps: float
    alg_temp: float
    threshold: float
    cached: bool

    def choose(self, view: View) -> tuple[Tensor, Tensor]:
        length = len(view.masked)
        tokens, commit = torch.zeros(length, dtype=torch.int64), torch.zeros(length).bool()
        masked = view.masked.nonzero().squeeze(-1)
        if self.cached and view.forward_in_block == 0:
            _, whole = self._sample(view.logits)
            tokens[0] = whole[view.block_start]
            commit[0] = True
            return tokens, commit
        share = rules.dream_share(self.steps, view.forward_in_block, self.eps)
        logits = view.block_logits[masked]
        if self.algorithm == "origin":
            chosen = torch.rand(len(masked)) < share
            _, tokens[masked[chosen]] = self._sample(logits[chosen])
            commit[masked[chosen]] = True
            return tokens, commit
        confidence = torch.full((len(view.x),), -math.inf)
        positions = view.block_start + masked
        confidence[positions], tokens[masked] = self._sample(logits)
        if self.algorithm == "capped_threshold":
            commit[masked] = self._under_cap(confidence[positions])
            return tokens, commit
        count = int(torch.tensor(float(len(masked))) * torch.tensor(share))
        if self.alg_temp and count:
            weights = (confidence / self.alg_temp).softmax(-1)
            commit[torch.multinomial(weights, count) - view.block_start] = True
        else:
            # topk's own choice among equals, which top_p makes common, over what the model saw.
            seen = confidence[view.window_start :][: len(view.logits)]
            best = seen.topk(count).indices + view.window_start
            commit[best - view.block_start] = True
        return tokens, commit

    def _sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.temperature > 0:
            logits = logits / self.temperature
        least = torch.finfo(logits.dtype).min
        if self.top_p < 1:
            ordered, order = logits.sort(descending=True)
            beyond = ordered.softmax(-1).cumsum(-1) > self.top_p
            beyond[..., 1:] = beyond[..., :-1].clone()
            beyond[..., 0] = False
            drop = torch.zeros_like(beyond).scatter_(-1, order, beyond)
            logits = logits.masked_fill(drop, least)
        if self.top_k:
            kth = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < kth, least)
        p = logits.softmax(-1)
        if self.temperature > 0:
            tokens = Categorical(probs=p).sample()
            confidence = p.gather(-1, tokens[..., None]).squeeze(-1)
        else:
            confidence, tokens = p.max(-1)
        if self.algorithm == "topk_margin":
            best, second = p.topk(2).values.unbind(-1)
            confidence = best - second
        if self.algorithm == "entropy":
            confidence = (p * (p + 1e-10).log()).sum(-1)
        return confidence, tokens

    _base: int = 0
    _left: int = 0
    _forward: int = 0

    def _under_cap(self, confidence: Tensor) -> Tensor:
        """Commits at most as many as the schedule is due; what it falls short by is added later."""
        if self._forward == 0:
            self._base = len(confidence) // self.steps
        due, self._left = self._base + self._left, 0
        ranked = confidence.argsort(descending=True)[:due]
        passing = confidence[ranked] >= self.threshold
        passing[:1] = True
        self._left = int((~passing).sum())
        if self._left and self._forward == self.steps - 1:
            self._base = 0
            self.steps += 1
        self._forward += 1
        commit = torch.zeros(len(confidence), dtype=torch.bool)
        commit[ranked[passing]] = True
        return commit


def _best(confidence: Tensor, masked: Tensor, count: int) -> Tensor:
    ranked = confidence.masked_fill(~masked, -math.inf)
    commit = torch.zeros(len(masked), dtype=torch.bool)
    commit[ranked.sort(descending=True, stable=True).indices[:count]] = True
    return commit & masked


__all__ = ["DreamSampler", "GuidedPredictor", "LLaDASampler", "Sampler"]
