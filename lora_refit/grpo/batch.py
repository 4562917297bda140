"""A batch of rollouts as tensors, the same on every trainer rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class RolloutBatch:
    """Prompts with their sampled responses; the rows of one prompt follow each other.

    tokens: int64 `[rows, length]`, prompt then response, padded on the right, where a causal model
        never looks. prompt_lengths, response_lengths: int64 `[rows]`, at least 1.
    rollout_log_probs: float32 `[rows, width]`, of the response tokens as the engine sampled them;
        width is the longest response. rewards: float32 `[rows]`.
    """

    tokens: torch.Tensor
    prompt_lengths: torch.Tensor
    response_lengths: torch.Tensor
    rollout_log_probs: torch.Tensor
    rewards: torch.Tensor

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def mask(self) -> torch.Tensor:
        """float32 `[rows, width]`: 1 for response tokens, 0 for padding."""
        columns = torch.arange(self.rollout_log_probs.shape[1], device=self.tokens.device)
        return (columns < self.response_lengths[:, None]).float()

    @property
    def positions(self) -> torch.Tensor:
        """int64 `[rows, width]`: where the model predicts each response token; padding repeats."""
        columns = torch.arange(self.rollout_log_probs.shape[1], device=self.tokens.device)
        last = (self.response_lengths - 1)[:, None]
        return self.prompt_lengths[:, None] - 1 + torch.minimum(columns, last)

    @property
    def targets(self) -> torch.Tensor:
        """int64 `[rows, width]`: the response tokens."""
        return self.tokens.gather(1, self.positions + 1)

    def select(self, rows: torch.Tensor) -> RolloutBatch:
        """Only the given rows (int64 indices), in that order."""
        return RolloutBatch(*(getattr(self, field.name)[rows] for field in fields(self)))

    def distinct(self) -> tuple[RolloutBatch, torch.Tensor]:
        """One row for each distinct prompt and response, and the index that expands them again.

        Samples of one prompt often agree, the more so the better the policy gets.
        """
        lengths = torch.stack([self.prompt_lengths, self.response_lengths], dim=1)
        keys = torch.cat([lengths, self.tokens], dim=1)
        values, expand = keys.unique(dim=0, return_inverse=True)
        order = torch.arange(self.rows, device=keys.device)
        first = torch.full_like(order[: len(values)], self.rows)
        return self.select(first.scatter_reduce(0, expand, order, "amin")), expand


def pack_rollouts(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]],
    rewards: Sequence[float],
) -> RolloutBatch:
    """Pad lists of one entry a row into a batch."""
    sequences = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    return RolloutBatch(
        tokens=_pad(sequences, torch.int64),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        response_lengths=torch.tensor([len(response) for response in responses]),
        rollout_log_probs=_pad(log_probs, torch.float32),
        rewards=torch.tensor(rewards, dtype=torch.float32),
    )


def broadcast_rollouts(batch: RolloutBatch | None, device: torch.device) -> RolloutBatch:
    """Rank 0's batch on every rank. Collective; other ranks pass None."""
    shape = torch.zeros(3, dtype=torch.int64, device=device)
    if batch is not None:
        shape.copy_(torch.tensor([*batch.tokens.shape, batch.rollout_log_probs.shape[1]]))
    dist.broadcast(shape, src=0)
    rows, length, width = shape.tolist()
    empty = RolloutBatch(
        tokens=torch.zeros(rows, length, dtype=torch.int64, device=device),
        prompt_lengths=torch.zeros(rows, dtype=torch.int64, device=device),
        response_lengths=torch.zeros(rows, dtype=torch.int64, device=device),
        rollout_log_probs=torch.zeros(rows, width, device=device),
        rewards=torch.zeros(rows, device=device),
    )
    for field in fields(empty):
        tensor = getattr(empty, field.name)
        if batch is not None:
            tensor.copy_(getattr(batch, field.name))
        dist.broadcast(tensor, src=0)
    return empty


def _pad(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    padded = torch.zeros(len(rows), max(map(len, rows)), dtype=dtype)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = torch.tensor(row, dtype=dtype)
    return padded
