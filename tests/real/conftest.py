"""Live engines and trainer ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trainer
from rig import MODELS, EngineCase, LiveEngine, Refitted, policy_config

from lora_refit import Spec
from lora_refit.testing.engine import cpu_llm, shutdown
from lora_refit.testing.megatron import PolicyConfig
from lora_refit.testing.ranks import TrainerRanks


@pytest.fixture(scope="session")
def live(request: pytest.FixtureRequest, tiny: Callable[..., Any]) -> Iterator[LiveEngine]:
    """The engine of an EngineCase; lives as long as tests ask for it in a row."""
    from lora_refit.testing.worker import Inspector

    case: EngineCase = request.param
    model = tiny(**MODELS[case.model])
    llm = cpu_llm(
        model,
        tensor_parallel=case.tensor_parallel,
        dtype=case.dtype,
        enable_lora=case.enable_lora,
        load_format=case.load_format,
        max_lora_rank=case.max_lora_rank,
        max_loras=case.max_loras,
        worker_extension_cls=case.worker,
        **({"weight_transfer_config": {"backend": "lora_refit"}} if case.takes_merged else {}),
    )
    yield LiveEngine(case, llm, model, Inspector(llm))
    shutdown(llm)


@pytest.fixture(scope="session")
def policy() -> Iterator[Callable[[PolicyConfig], TrainerRanks]]:
    """`policy(config)` are trainer ranks that hold this policy.

    Ranks are kept for the next test with the same config. Others get new processes: Megatron never
    closes the process groups of a policy that is replaced.
    """
    held: dict[int, tuple[PolicyConfig, TrainerRanks]] = {}

    def end(size: int) -> None:
        if size in held:
            held.pop(size)[1].__exit__(None, None, None)

    def of(config: PolicyConfig) -> TrainerRanks:
        size = config.tensor_parallel
        if size not in held or held[size][0] != config:
            end(size)
            held[size] = config, TrainerRanks(size, timeout_s=120.0).__enter__()
            held[size][1].call(trainer.build, config)
        return held[size][1]

    yield of
    for size in list(held):
        end(size)


@pytest.fixture
def attach(
    live: LiveEngine, policy: Callable[[PolicyConfig], TrainerRanks]
) -> Iterator[Callable[..., Refitted]]:
    """`attach(2, lora_rank=6)` attaches the engine to a policy on two trainer ranks.

    With `ranks`, the policy is built on those. With `engine`, that handle is attached once more.
    Slots are given back after the test.
    """
    from lora_refit.vllm import RefitEngine

    engines: list[Any] = []

    def make(
        trainer_tp: int,
        scale_rounding: str = "engine",
        timeout_s: float = 20.0,
        ranks: TrainerRanks | None = None,
        engine: Any = None,
        memory: str = "auto",
        **settings: Any,
    ) -> Refitted:
        config = policy_config(live.model, trainer_tp, **settings)
        if ranks is None:
            ranks = policy(config)
        else:
            ranks.call(trainer.build, config)
        spec = Spec.from_bytes(
            ranks.call(trainer.offer, live.case.dtype, scale_rounding, memory)[0]
        )
        if engine is None:
            engine = RefitEngine(live.llm, timeout_s=timeout_s)
            engines.append(engine)
        return Refitted(live, ranks, engine, engine.attach(spec))

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def attach_merged(
    live: LiveEngine, policy: Callable[[PolicyConfig], TrainerRanks]
) -> Iterator[Callable[..., Refitted]]:
    """`attach_merged(2, bucket_bytes=1 << 20)` attaches the engine to a publisher in merged mode on
    two trainer ranks; `policy_settings` are those of the policy."""
    from lora_refit.vllm import RefitEngine

    engines: list[Any] = []

    def make(
        trainer_tp: int,
        dtype: str = "",
        policy_settings: dict[str, Any] | None = None,
        ranks: TrainerRanks | None = None,
        **settings: Any,
    ) -> Refitted:
        config = policy_config(live.model, trainer_tp, **(policy_settings or {}))
        if ranks is None:
            ranks = policy(config)
        else:
            ranks.call(trainer.build, config)
        answers = ranks.call(trainer.offer_merged, dtype or live.case.dtype, settings)
        engine = RefitEngine(live.llm, timeout_s=20.0)
        engines.append(engine)
        return Refitted(live, ranks, engine, engine.attach(Spec.from_bytes(answers[0])))

    make.ranks = lambda trainer_tp: policy(policy_config(live.model, trainer_tp))  # type: ignore
    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def mortals() -> Iterator[TrainerRanks]:
    """Two trainer ranks of one test alone, which may kill them."""
    with TrainerRanks(2, timeout_s=120.0) as ranks:
        yield ranks
