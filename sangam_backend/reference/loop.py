"""Block-wise generation of one request with Fast-dLLM's caches."""

from __future__ import annotations

import torch
from torch import Tensor

from sangam_backend.attention import attend
from sangam_backend.config import Cache
from sangam_backend.models.transformer import Transformer, split_and_rotate
from sangam_backend.reference.sampler import Sampler, View
from sangam_backend.request import Output, Request


class DenseAttention:
    """Attention over one sequence: the window's K/V replace those cached, then it sees all."""

    def __init__(self, model: Transformer, length: int) -> None:
        self.model = model
        config = model.config
        shape = (config.num_layers, 2, length, config.num_kv_heads, config.head_dim)
        self.cache = torch.zeros(shape, dtype=model.head.dtype, device=model.head.device)
        self.window = slice(0, length)

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        positions = torch.arange(self.window.start, self.window.stop, device=qkv.device)
        q, k, v = split_and_rotate(qkv, positions, self.model.rope, self.model.config)
        self.cache[layer, 0, self.window] = k
        self.cache[layer, 1, self.window] = v
        return attend(q, self.cache[layer, 0], self.cache[layer, 1]).flatten(1)


class Predictor:
    """Logits of a window of the sequence, its other K/V staying as they were."""

    def __init__(self, model: Transformer, length: int) -> None:
        self.model = model
        self.attention = DenseAttention(model, length)

    def predict(self, x: Tensor, start: int, end: int) -> Tensor:
        """Logits [end - start, vocab] for positions start to end of the sequence x.

        A shifted model is shifted inside the window, whose first row keeps its own logits.
        """
        self.attention.window = slice(start, end)
        logits = self.model.logits(self.model.forward(x[start:end], self.attention))
        if self.model.config.logit_shift:
            logits = torch.cat([logits[:1], logits[:-1]])
        return logits


@torch.inference_mode()
def generate(
    request: Request, predictor: Predictor, sampler: Sampler, cache: Cache
) -> list[Output]:
    """Generates one request to its end.

    Each block starts with a forward over the whole sequence. What follows sees the whole sequence
    again (`none`), the block and all after it (`prefix`) or the block alone (`dual`).
    """
    x = torch.tensor(request.prompt + request.canvas, device=predictor.model.head.device)
    mask_token_id = predictor.model.config.mask_token_id
    outputs: list[Output] = []
    while request.finish_reason is None:
        start = request.block_start
        end = start + request.params.block_length
        window = (0, len(x))
        if cache != "none" and request.forward_in_block > 0:
            window = (start, len(x) if cache == "prefix" else end)
        view = View(
            x=x,
            logits=predictor.predict(x, *window),
            window_start=window[0],
            block_start=start,
            block_end=end,
            masked=x[start:end] == mask_token_id,
            block=request.block,
            forward_in_block=request.forward_in_block,
            forward=request.forward,
        )
        tokens, commit = sampler.choose(view)
        x[start:end] = torch.where(commit & view.masked, tokens, x[start:end])
        request.forward_in_block += 1
        if (output := request.advance(request.block, x[start:end].tolist())) is not None:
            outputs.append(output)
        if request.finished_blocks > request.block:
            request.plan_next_block()
    return outputs
