"""vLLM's weight transfer lifecycle, which merged weights are loaded through."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from lora_refit.devices import finish_current_work
from lora_refit.engines.vllm.weights import EngineWeights
from lora_refit.errors import CommitFailed, RefitError


class BucketSource(Protocol):
    """Where a worker gets the weights of a staged version from."""

    def take(self, bucket: int) -> Iterable[tuple[str, torch.Tensor]]:
        """The weights [out, in] that a bucket completes, by their checkpoint names, in memory of
        their own. Raises a RefitError if the bucket is not what was staged."""
        ...


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: a worker learns of its trainers when their spec is attached."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Loads one bucket on one worker. worker: its rank."""

    worker: int
    version: int
    sequence: int
    bucket: int


class RefitTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads buckets through vLLM's start, update and finish.

    No hook raises: with tensor parallelism vLLM's RPC stays out of step for good after one rank has
    raised. A failure is kept in `failure`, and the hooks that follow do nothing but clean up.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.weights = EngineWeights(model, vllm_config)
        self._source: BucketSource | None = None
        self._failure = ""
        self._updates: list[UpdateInfo] = []

    @property
    def failure(self) -> str:
        """What went wrong since the update was started; empty if nothing did."""
        return self._failure

    @property
    def updates(self) -> tuple[UpdateInfo, ...]:
        """The buckets that were loaded since the update was started."""
        return tuple(self._updates)

    def bind(self, source: BucketSource | None) -> None:
        """Let updates take their buckets from this source; None ends that."""
        self._source = source

    def abandon(self) -> None:
        """End an update that was left half-way, so that the model can run. Never raises."""
        self._guarded("abandon", self.weights.abort)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to do: attaching a spec is what connects a worker."""

    def start_weight_update(self) -> None:
        self._failure = ""
        self._updates = []
        self._guarded("start", self._start)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket; the base class would synchronise an accelerator that a CPU lacks."""
        if not self._failure:
            self._guarded(
                "update", lambda: self.receive_weights(self.parse_update_info(update_info))
            )

    def receive_weights(self, update_info: UpdateInfo) -> None:
        rank = self.parallel_config.rank
        if update_info.worker != rank:
            raise CommitFailed(
                f"worker {rank} was sent the update of worker {update_info.worker}; send a list of "
                "updates in the order of ranks"
            )
        self.weights.load(self._require_source().take(update_info.bucket))
        finish_current_work(self.device)
        self._updates.append(update_info)

    def finish_weight_update(self) -> None:
        """Complete the reload; after a failure, make the model able to run."""
        if self._failure:
            self.abandon()
        else:
            self._guarded("finish", self.weights.finish)

    def shutdown(self) -> None:
        self.abandon()
        self.bind(None)

    def _start(self) -> None:
        self._require_source()
        self.weights.start()

    def _require_source(self) -> BucketSource:
        if self._source is None:
            raise CommitFailed("nothing is staged on this worker; refit through RefitEngine")
        return self._source

    def _guarded(self, step: str, work: Callable[[], None]) -> None:
        try:
            work()
        except RefitError as error:
            self._note(f"{step}: {error}")
        except Exception as error:
            where = "".join(traceback.format_exception(error)[-3:])
            self._note(f"{step}: unexpected {error!r}\n{where}")

    def _note(self, failure: str) -> None:
        """The first failure is the cause of those that follow."""
        self._failure = self._failure or failure
