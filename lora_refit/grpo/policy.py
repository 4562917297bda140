"""The trained policy: a Megatron LoRA model over tensor and pipeline parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lora_refit.grpo.batch import RolloutBatch
from lora_refit.grpo.optimizer import AdapterOptimizer
from lora_refit.testing.megatron import PolicyConfig, adapter_parameters, build_policy

TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(log-probs `[rows, width]` with gradient, indices of these rows in the batch) -> scalar loss."""


@dataclass(frozen=True)
class UpdateReport:
    """One optimizer step. log_probs: `[rows, width]`, of the policy before the step."""

    loss: float
    grad_norm: float
    log_probs: torch.Tensor


class MegatronPolicy:
    """Log-probabilities and updates of the policy. Every method is collective over all ranks.

    Results are the same on every rank. `micro_batch_rows` bounds the rows of one forward pass.
    """

    def __init__(
        self,
        config: PolicyConfig,
        learning_rate: float,
        max_grad_norm: float = 1.0,
        micro_batch_rows: int = 64,
    ) -> None:
        ranks = config.tensor_parallel * config.pipeline_parallel
        if dist.get_world_size() != ranks:
            raise ValueError(
                f"{dist.get_world_size()} ranks for tensor_parallel={config.tensor_parallel} x "
                f"pipeline_parallel={config.pipeline_parallel}: this driver has no data "
                f"parallelism, start {ranks} ranks"
            )
        policy = build_policy(config)
        self.bridge, self.chunks, self._peft = policy.bridge, policy.chunks, policy.peft
        from megatron.core import parallel_state

        self._optimizer = AdapterOptimizer(
            [parameter for _, parameter in adapter_parameters(self.chunks)],
            learning_rate,
            max_grad_norm,
            parallel_state.get_model_parallel_group(),
        )
        self._micro_batch_rows = micro_batch_rows
        self._length_multiple = config.tensor_parallel if config.sequence_parallel else 1

    def log_probs(self, batch: RolloutBatch) -> torch.Tensor:
        """float32 `[rows, width]` of the response tokens; padding holds arbitrary values."""
        return self._run(batch, loss=None)[0]

    def reference_log_probs(self, batch: RolloutBatch) -> torch.Tensor:
        """The same of the base model, with the adapter switched off."""
        self._peft.disable_adapter_layers(self.chunks)
        try:
            return self.log_probs(batch)
        finally:
            self._peft.enable_adapter_layers(self.chunks)

    def update(self, batch: RolloutBatch, loss: TokenLoss) -> UpdateReport:
        """One optimizer step on the sum of `loss` over micro-batches."""
        log_probs, total = self._run(batch, loss)
        return UpdateReport(total, self._optimizer.step(), log_probs)

    def _run(self, batch: RolloutBatch, loss: TokenLoss | None) -> tuple[torch.Tensor, float]:
        """Megatron's pipeline schedule over the micro-batches, with backward if there is a loss."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        rows = torch.arange(batch.rows, device=batch.tokens.device).split(self._micro_batch_rows)
        results = get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, batch=batch, loss=loss, steps=len(rows)),
            data_iterator=iter(rows),
            model=self.chunks,
            num_microbatches=len(rows),
            seq_length=batch.tokens.shape[1],
            micro_batch_size=self._micro_batch_rows,
            forward_only=loss is None,
        )
        losses = torch.zeros(1, device=batch.tokens.device)
        log_probs = torch.zeros_like(batch.rollout_log_probs)
        if results:
            log_probs = torch.cat([result["log_probs"] for result in results])
            losses = torch.stack([result["loss"] for result in results]).sum(0, keepdim=True)
        return _from_last_stage(log_probs), float(_from_last_stage(losses))

    def _forward_step(
        self,
        micro_batches: Iterator[torch.Tensor],
        chunk: Any,
        *,
        batch: RolloutBatch,
        loss: TokenLoss | None,
        steps: int,
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, Any]]]]:
        rows = next(micro_batches)
        part, expand = batch.select(rows).distinct()
        tokens = _pad_columns(part.tokens, self._length_multiple)
        length = tokens.shape[1]
        output = chunk(
            tokens,
            torch.arange(length, device=tokens.device).expand_as(tokens),
            _causal_mask(length, tokens.device),
            output_processor=_response_log_probs,
            output_processor_context=(part.positions, part.targets),
        )

        def evaluate(distinct: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            log_probs = distinct[expand]
            value = log_probs.new_zeros(()) if loss is None else loss(log_probs, rows)
            # The schedule divides by the number of micro-batches.
            return value * steps, {"log_probs": log_probs.detach(), "loss": value.detach()}

        return output, evaluate


def _response_log_probs(
    *,
    hidden_states: torch.Tensor,
    output_layer: Any,
    output_weight: torch.Tensor | None,
    compute_language_model_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    context: tuple[torch.Tensor, torch.Tensor],
    **_: Any,
) -> torch.Tensor:
    """Called by Megatron's GPT model in place of its output layer: only response tokens need it.

    hidden_states: `[length, rows, hidden]`. Logits stay sharded over the vocabulary; Megatron's
    cross-entropy reduces them over the tensor parallel ranks. Returns float32 `[rows, width]`.
    """
    positions, targets = context
    wanted = positions.T.contiguous(), torch.arange(len(positions), device=positions.device)
    # Under sequence parallelism a rank holds part of the positions; the output layer gathers them.
    gathered_later = output_layer.sequence_parallel
    if not gathered_later:
        hidden_states = hidden_states[wanted]
    logits, _bias = output_layer(hidden_states, weight=output_weight)
    if gathered_later:
        logits = logits[wanted]
    return -compute_language_model_loss(targets, logits)


def _from_last_stage(value: torch.Tensor) -> torch.Tensor:
    """The last pipeline stage's value on every stage."""
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.broadcast(
            value,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
    return value


def _causal_mask(length: int, device: torch.device) -> torch.Tensor:
    """bool `[1, 1, length, length]`; True hides a position, Megatron's convention."""
    return torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool, device=device), 1)


def _pad_columns(tokens: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % multiple))
