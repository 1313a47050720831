"""Proposes tokens and commits them without a host sync, so that a CUDA graph can hold both.

The torch twins are `unmasking.propose` and `unmasking.commit_mask`, which say what the parameters
mean. The twin compares in float64 on a CPU, the kernels in float32.

A filter keeps a token by how much scores strictly above it, so both filters together keep all
scores above some floor. The floor is found by bisection, a pass over the scores each step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sangam_backend.config import MAX_BLOCK_LENGTH, Family
from sangam_backend.noise import Stream
from sangam_backend.rules import Count
from sangam_backend.unmasking import ENTROPY, MARGIN, RANDOM, CommitRows, SamplingRows

# mypy: disallow-untyped-decorators=False

CHUNK = 8192
"""Scores that a program holds at a time."""
PROPOSE_WARPS = 16
MAX_STOPS = 8
# Low bits that a logit, widened to float32, never uses: the bisection need not try them.
UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}

_TOKEN_STREAM = tl.constexpr(int(Stream.TOKEN))
_CONFIDENCE_STREAM = tl.constexpr(int(Stream.CONFIDENCE))
_COUNT_STREAM = tl.constexpr(int(Stream.COUNT))
_MARGIN = tl.constexpr(MARGIN)
_ENTROPY = tl.constexpr(ENTROPY)
_RANDOM = tl.constexpr(RANDOM)
_BY_THRESHOLD = tl.constexpr(int(Count.THRESHOLD))
_BY_FACTOR = tl.constexpr(int(Count.FACTOR))
_BY_QUOTA = tl.constexpr(int(Count.QUOTA))
_BY_SHARE = tl.constexpr(int(Count.SHARE))
_BY_RANDOM = tl.constexpr(int(Count.RANDOM))
_BY_FIRST = tl.constexpr(int(Count.FIRST))
_NEVER = tl.constexpr(float("-inf"))
# Below every logit, and finite: infinities have no difference.
_LOWEST = tl.constexpr(-3.0e38)


def propose(
    logits: Tensor,
    positions: Tensor,
    forward: Tensor,
    sampling: SamplingRows,
    family: Family,
    mask_token_id: int,
    stop_token_ids: Tensor,
) -> tuple[Tensor, Tensor]:
    """Proposes a token for each position, with its confidence; the logits stay as they are.

    Args:
        logits: [rows, block, vocab], contiguous, already shifted.
        positions: int64 [rows, block], contiguous, in the sequence.
        stop_token_ids: int64 [stops].

    Returns:
        Tokens int64 and confidences float32, both [rows, block].
    """
    rows, block, vocab = logits.shape
    assert logits.is_contiguous()
    assert positions.is_contiguous()
    assert stop_token_ids.numel() <= MAX_STOPS
    tokens = torch.empty(rows, block, dtype=torch.int64, device=logits.device)
    confidences = torch.empty(rows, block, dtype=torch.float32, device=logits.device)
    _propose_kernel[(rows * block,)](
        logits,
        positions,
        forward,
        *sampling,
        stop_token_ids,
        tokens,
        confidences,
        block,
        vocab,
        mask_token_id,
        tempered_confidence=family == "dream",
        unused_bits=UNUSED_BITS[logits.dtype],
        num_stops=stop_token_ids.numel(),
        chunk=CHUNK,
        num_warps=PROPOSE_WARPS,
    )
    return tokens, confidences


def commit_blocks(
    tokens: Tensor,
    slots: Tensor,
    positions: Tensor,
    lengths: Tensor,
    proposed: Tensor,
    confidences: Tensor,
    commit: CommitRows,
    sampling: SamplingRows,
    mask_token_id: int,
) -> Tensor:
    """Writes what each row commits into the table and returns the rows' blocks.

    Args:
        tokens: int64 [slots, sequence]; only columns before a row's length are written.
        slots: int64 [rows].
        positions: int64 [rows, block], in the sequence.
        lengths: int64 [rows], of the rows' blocks; 0 for a row that only pads the batch.
        proposed: int64 [rows, block].
        confidences: float32 [rows, block].

    Returns:
        int64 [rows, block]; columns past a row's length repeat its last token.
    """
    rows, block = positions.shape
    assert block <= MAX_BLOCK_LENGTH
    assert all(x.is_contiguous() for x in (positions, proposed, confidences))
    blocks = torch.empty(rows, block, dtype=torch.int64, device=positions.device)
    width = triton.next_power_of_2(block)
    _commit_kernel[(rows,)](
        tokens,
        tokens.stride(0),
        slots,
        positions,
        lengths,
        proposed,
        confidences,
        *commit,
        sampling.seed,
        blocks,
        block,
        mask_token_id,
        width=width,
        num_warps=max(4, width // 8),
    )
    return blocks


@triton.jit(do_not_specialize=["block"])
def _propose_kernel(
    logits: tl.tensor,
    positions: tl.tensor,
    forwards: tl.tensor,
    temperatures: tl.tensor,
    top_ps: tl.tensor,
    top_ks: tl.tensor,
    seeds: tl.tensor,
    measures: tl.tensor,
    min_positions: tl.tensor,
    stops: tl.tensor,
    tokens: tl.tensor,
    confidences: tl.tensor,
    block: tl.tensor,
    vocab: tl.tensor,
    mask_token: tl.tensor,
    tempered_confidence: tl.constexpr,
    unused_bits: tl.constexpr,
    num_stops: tl.constexpr,
    chunk: tl.constexpr,
) -> None:
    index = tl.program_id(0)
    row = index // block
    scores = logits + index.to(tl.int64) * vocab
    position = tl.load(positions + index)
    early = position < tl.load(min_positions + row)
    forward = tl.load(forwards + row)
    seed = tl.load(seeds + row)
    temperature = tl.load(temperatures + row).to(tl.float32)
    top_p = tl.load(top_ps + row).to(tl.float32)
    top_k = tl.load(top_ks + row)
    measure = tl.load(measures + row)

    best, token, plain_total = _greedy(scores, vocab, mask_token, stops, early, num_stops, chunk)
    warm = temperature > 0.0
    filtered = (top_p < 1.0) | (top_k > 0)
    divisor = tl.where(warm, temperature, 1.0)
    total = plain_total
    floor = tl.full([], _NEVER, tl.float32)
    if warm & (filtered | tempered_confidence):
        total, _ = _above(
            floor, best, divisor, scores, vocab, mask_token, stops, early, num_stops, chunk
        )
    if filtered:
        floor = _find_floor(
            top_p, top_k, total, best, divisor,
            scores, vocab, mask_token, stops, early, num_stops, chunk, unused_bits,
        )  # fmt: skip
        if tempered_confidence:
            total, _ = _above(
                floor, best, divisor, scores, vocab, mask_token, stops, early, num_stops, chunk
            )
    if warm:
        state = _noise_state(seed, _TOKEN_STREAM, forward, position)
        token = _draw(
            state, floor, best, divisor,
            scores, vocab, mask_token, stops, early, num_stops, chunk,
        )  # fmt: skip
    if not tempered_confidence:
        floor = tl.full([], _NEVER, tl.float32)
        divisor = tl.full([], 1.0, tl.float32)
        total = plain_total

    chosen = tl.load(scores + token).to(tl.float32)
    confidence = tl.exp((chosen - best) / divisor) / total
    if measure == _MARGIN:
        second = _runner_up(best, scores, vocab, mask_token, stops, early, num_stops, chunk)
        behind = tl.where(second > floor, tl.exp((second - best) / divisor), 0.0)
        confidence = (1.0 - behind) / total
    if measure == _ENTROPY:
        confidence = _negative_entropy(
            total, floor, best, divisor,
            scores, vocab, mask_token, stops, early, num_stops, chunk,
        )  # fmt: skip
    if measure == _RANDOM:
        state = _noise_state(seed, _CONFIDENCE_STREAM, forward, position)
        confidence = _uniform(_noise_bits(state, 0))
    tl.store(tokens + index, token.to(tl.int64))
    tl.store(confidences + index, confidence)


@triton.jit
def _scores_at(
    lanes: tl.tensor,
    scores: tl.tensor,
    vocab: tl.tensor,
    mask_token: tl.tensor,
    stops: tl.tensor,
    early: tl.tensor,
    num_stops: tl.constexpr,
) -> tl.tensor:
    """Scores in float32, -inf for tokens that must not be proposed."""
    found = tl.load(scores + lanes, mask=lanes < vocab, other=_NEVER).to(tl.float32)
    found = tl.where(lanes == mask_token, _NEVER, found)
    for i in tl.static_range(num_stops):
        stop = tl.where(early, tl.load(stops + i).to(tl.int32), -1)
        found = tl.where(lanes == stop, _NEVER, found)
    return found


@triton.jit
def _greedy(
    scores: tl.tensor,
    vocab: tl.tensor,
    mask_token: tl.tensor,
    stops: tl.tensor,
    early: tl.tensor,
    num_stops: tl.constexpr,
    chunk: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The best score, its first token, and the sum of exp(score - best).

    Each lane keeps its own, so that the loop needs no reduction.
    """
    peak = tl.full([chunk], _LOWEST, tl.float32)
    mass = tl.zeros([chunk], tl.float32)
    first = tl.zeros([chunk], tl.int32)
    for start in range(0, vocab, chunk):
        lanes = start + tl.arange(0, chunk)
        found = _scores_at(lanes, scores, vocab, mask_token, stops, early, num_stops)
        better = found > peak
        # One of the old and the new term is exp(0).
        smaller = tl.exp(-tl.abs(found - peak))
        mass = tl.where(better, mass * smaller + 1.0, mass + smaller)
        first = tl.where(better, lanes, first)
        peak = tl.where(better, found, peak)
    best = tl.max(peak, 0)
    token = tl.min(tl.where(peak == best, first, vocab), 0)
    return best, token, tl.sum(mass * tl.exp(peak - best), 0)


@triton.jit
def _above(
    floor: tl.tensor,
    best: tl.tensor,
    divisor: tl.tensor,
    scores: tl.tensor,
    vocab: tl.tensor,
    mask_token: tl.tensor,
    stops: tl.tensor,
    early: tl.tensor,
    num_stops: tl.constexpr,
    chunk: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Sum of exp((score - best) / divisor) over the scores above the floor, and their number."""
    mass = tl.zeros([chunk], tl.float32)
    count = tl.zeros([chunk], tl.int32)
    for start in range(0, vocab, chunk):
        lanes = start + tl.arange(0, chunk)
        found = _scores_at(lanes, scores, vocab, mask_token, stops, early, num_stops)
        mass += tl.where(found > floor, tl.exp((found - best) / divisor), 0.0)
        count += (found > floor).to(tl.int32)
    return tl.sum(mass, 0), tl.sum(count, 0)


@triton.jit
def _find_floor(
    top_p: tl.tensor,
    top_k: tl.tensor,
    total: tl.tensor,
    best: tl.tensor,
    divisor: tl.tensor,
    scores: tl.tensor,
    vocab: tl.tensor,
    mask_token: tl.tensor,
    stops: tl.tensor,
    early: tl.tensor,
    num_stops: tl.constexpr,
    chunk: tl.constexpr,
    unused_bits: tl.constexpr,
) -> tl.tensor:
    """The highest score that the filters drop, or -inf."""
    most_mass = tl.where(top_p < 1.0, top_p * total, float("inf"))
    most_count = tl.where(top_k > 0, top_k, vocab + 1)
    dropped = _order(tl.full([], _NEVER, tl.float32), unused_bits)
    kept = _order(best, unused_bits)
    while kept - dropped > 1:
        middle = (kept + dropped) >> 1
        mass, count = _above(
            _unorder(middle, unused_bits), best, divisor,
            scores, vocab, mask_token, stops, early, num_stops, chunk,
        )  # fmt: skip
        keep = (mass <= most_mass) & (count < most_count)
        kept = tl.where(keep, middle, kept)
        dropped = tl.where(keep, dropped, middle)
    return _unorder(dropped, unused_bits)


@triton.jit
def _order(score: tl.tensor, unused_bits: tl.constexpr) -> tl.tensor:
    """An integer that grows with the score, by 1 from each to the next."""
    bits = score.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> unused_bits


@triton.jit
def _unorder(order: tl.tensor, unused_bits: tl.constexpr) -> tl.tensor:
    """The score of that order."""
    # In a negative score's image the unused bits are ones.
    image = (order << unused_bits) + tl.where(order < 0, (1 << unused_bits) - 1, 0)
    bits = tl.where(image < 0, image ^ 0x7FFFFFFF, image)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _draw(
    state: tl.tensor,
    floor: tl.tensor,
    best: tl.tensor,
    divisor: tl.tensor,
    scores: tl.tensor,
    vocab: tl.tensor,
    mask_token: tl.tensor,
    stops: tl.tensor,
    early: tl.tensor,
    num_stops: tl.constexpr,
    chunk: tl.constexpr,
) -> tl.tensor:
    """The first token whose tempered score and Gumbel noise are the highest."""
    peak = tl.full([chunk], _LOWEST, tl.float32)
    first = tl.zeros([chunk], tl.int32)
    for start in range(0, vocab, chunk):
        lanes = start + tl.arange(0, chunk)
        found = _scores_at(lanes, scores, vocab, mask_token, stops, early, num_stops)
        noise = -tl.log(-tl.log(_uniform(_noise_bits(state, lanes))))
        ranked = tl.where(found > floor, (found - best) / divisor + noise, _NEVER)
        better = ranked > peak
        first = tl.where(better, lanes, first)
        peak = tl.where(better, ranked, peak)
    return tl.min(tl.where(peak == tl.max(peak, 0), first, vocab), 0)


@triton.jit
def _runner_up(
    best: tl.tensor,
    scores: tl.tensor,
    vocab: tl.tensor,
    mask_token: tl.tensor,
    stops: tl.tensor,
    early: tl.tensor,
    num_stops: tl.constexpr,
    chunk: tl.constexpr,
) -> tl.tensor:
    """The second of the scores, which equals the best if that occurs twice."""
    peak = tl.full([chunk], _NEVER, tl.float32)
    times_best = tl.zeros([chunk], tl.int32)
    for start in range(0, vocab, chunk):
        lanes = start + tl.arange(0, chunk)
        found = _scores_at(lanes, scores, vocab, mask_token, stops, early, num_stops)
        times_best += (found == best).to(tl.int32)
        peak = tl.where((found > peak) & (found < best), found, peak)
    return tl.where(tl.sum(times_best, 0) > 1, best, tl.max(peak, 0))


@triton.jit
def _negative_entropy(
    total: tl.tensor,
    floor: tl.tensor,
    best: tl.tensor,
    divisor: tl.tensor,
    scores: tl.tensor,
    vocab: tl.tensor,
    mask_token: tl.tensor,
    stops: tl.tensor,
    early: tl.tensor,
    num_stops: tl.constexpr,
    chunk: tl.constexpr,
) -> tl.tensor:
    terms = tl.zeros([chunk], tl.float32)
    for start in range(0, vocab, chunk):
        lanes = start + tl.arange(0, chunk)
        found = _scores_at(lanes, scores, vocab, mask_token, stops, early, num_stops)
        probability = tl.where(found > floor, tl.exp((found - best) / divisor) / total, 0.0)
        terms += probability * tl.log(probability + 1e-10)
    return tl.sum(terms, 0)


@triton.jit(do_not_specialize=["block"])
def _commit_kernel(
    table: tl.tensor,
    table_stride: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    lengths: tl.tensor,
    proposed: tl.tensor,
    confidences: tl.tensor,
    rules: tl.tensor,
    values: tl.tensor,
    forwards: tl.tensor,
    seeds: tl.tensor,
    blocks: tl.tensor,
    block: tl.tensor,
    mask_token: tl.tensor,
    width: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    columns = tl.arange(0, width)
    inside = columns < block
    cells = row * block + columns
    length = tl.load(lengths + row)
    position = tl.load(positions + cells, mask=inside, other=0)
    entries = table + tl.load(slots + row) * table_stride + position
    tokens = tl.load(entries, mask=inside, other=0)
    masked = (tokens == mask_token) & (columns < length) & inside

    rule = tl.load(rules + row)
    seed = tl.load(seeds + row)
    forward = tl.load(forwards + row)
    draws = _uniform(_noise_bits(_noise_state(seed, _CONFIDENCE_STREAM, forward, position), 0))
    confidence = tl.load(confidences + cells, mask=inside, other=0.0)
    confidence = tl.where(rule == _BY_RANDOM, draws, confidence)
    confidence = tl.where(masked, confidence, _NEVER)
    rank = _rank(confidence, masked, columns)

    value = tl.load(values + row).to(tl.float32)
    num_masked = tl.sum(masked.to(tl.int32), 0)
    draw = _noise_bits(_noise_state(seed, _COUNT_STREAM, forward, 0), 0)
    count = _count(rule, value, draw, confidence, rank, masked, num_masked)
    chosen = tl.where(rule == _BY_FIRST, columns == 0, rank < count) & masked

    tokens = tl.where(chosen, tl.load(proposed + cells, mask=inside, other=0), tokens)
    tl.store(entries, tokens, mask=chosen)
    last = tl.sum(tl.where(columns == tl.maximum(length, 1) - 1, tokens, 0), 0)
    tl.store(blocks + cells, tl.where(columns < length, tokens, last), mask=inside)


@triton.jit
def _rank(confidence: tl.tensor, masked: tl.tensor, columns: tl.tensor) -> tl.tensor:
    """How many masked columns go before each: higher ones, and equal ones to the left."""
    other, own = confidence[None, :], confidence[:, None]
    left = columns[None, :] < columns[:, None]
    before = ((other > own) | ((other == own) & left)) & masked[None, :]
    return tl.sum(before.to(tl.int32), 1)


@triton.jit
def _count(
    rule: tl.tensor,
    value: tl.tensor,
    draw: tl.tensor,
    confidence: tl.tensor,
    rank: tl.tensor,
    masked: tl.tensor,
    num_masked: tl.tensor,
) -> tl.tensor:
    """How many columns the row commits."""
    reached = tl.sum((masked & (confidence >= value)).to(tl.int32), 0)
    count = tl.where(rule == _BY_THRESHOLD, tl.maximum(reached, 1), 1)
    short = masked & (rank > 0) & (confidence < 1.0 - value / (rank + 2).to(tl.float32))
    first_short = tl.min(tl.where(short, rank + 1, num_masked), 0)
    factor = tl.where(first_short >= num_masked, num_masked, first_short - 1)
    count = tl.where(rule == _BY_FACTOR, factor, count)
    count = tl.where(rule == _BY_QUOTA, value.to(tl.int32), count)
    share = (num_masked.to(tl.float32) * value).to(tl.int32)
    count = tl.where(rule == _BY_SHARE, share, count)
    # draw * num_masked in integers, since float32 could round it up to the next one.
    random = 1 + (((2 * draw.to(tl.int64) + 1) * num_masked) >> 24).to(tl.int32)
    return tl.where(rule == _BY_RANDOM, random, count)


@triton.jit
def _noise_state(
    seed: tl.tensor, stream: tl.constexpr, forward: tl.tensor, position: tl.tensor
) -> tl.tensor:
    """The state of `noise.uniform` before it mixes in the lane."""
    state = _mix(seed.to(tl.uint32), (seed >> 32).to(tl.uint32))
    state = _mix(state, tl.full([], stream, tl.uint32))
    state = _mix(state, forward.to(tl.uint32))
    return _mix(state, tl.cast(position, tl.uint32))


@triton.jit
def _noise_bits(state: tl.tensor, lanes: tl.tensor) -> tl.tensor:
    """The 23 bits of a draw."""
    return _mix(state, tl.cast(lanes, tl.uint32)) >> 9


@triton.jit
def _uniform(bits: tl.tensor) -> tl.tensor:
    return (bits.to(tl.float32) + 0.5) * (1.0 / 8388608.0)


@triton.jit
def _mix(state: tl.tensor, part: tl.tensor) -> tl.tensor:
    mixed = state * 0x9E3779B1 + part + 1
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B
    return mixed ^ (mixed >> 16)
