"""What a run shows and leaves behind: a live terminal, a metrics file and a plot."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typing_extensions import Self

from lora_refit.grpo.metrics import RunReport, StepMetrics

_PHASES = ("pack", "stage", "commit")


class Display:
    """A progress bar with one line for each step above it; also appends to `metrics.jsonl`."""

    def __init__(self, title: str, steps: int, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._console = Console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task(title, total=steps)
        self._metrics_path = folder / "metrics.jsonl"
        self._metrics_path.write_text("")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def step(self, metrics: StepMetrics) -> None:
        """Show and record one step."""
        with self._metrics_path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(metrics)) + "\n")
        phases = " ".join(f"{name} {metrics.refit_ms[name]:.1f}" for name in _PHASES)
        self._progress.console.print(
            f"[dim]step[/dim] {metrics.step:3d}  [dim]version[/dim] {metrics.version}  "
            f"[dim]reward[/dim] [bold]{metrics.reward:.3f}[/bold]  "
            f"[dim]loss[/dim] {metrics.loss:+.4f}  "
            f"[dim]gen_kl[/dim] {metrics.gen_kl_error:.1e}  "
            f"[dim]|dp|[/dim] {metrics.token_prob_error:.1e}  "
            f"[dim]refit[/dim] {metrics.refit_s * 1e3:.1f} ms "
            f"[dim]({phases}; {metrics.refit_share:.2%} of the step)[/dim]  "
            f"[dim]rollout[/dim] {metrics.rollout_s:.1f} s  "
            f"[dim]train[/dim] {metrics.train_s:.1f} s",
            highlight=False,
            soft_wrap=True,
        )
        self._progress.advance(self._task)

    def finish(self, report: RunReport) -> None:
        """Show the summary and write the plot."""
        self._progress.stop()
        self._console.print(summary_table(report))
        path = self._folder / "grpo.png"
        plot(report.steps, path)
        self._console.print(f"metrics: {self._metrics_path}\nplot:    {path}", highlight=False)


def summary_table(report: RunReport) -> Table:
    steps = report.steps
    table = Table(title="GRPO with a refit each step", show_header=False)
    table.add_row("steps", str(len(steps)))
    table.add_row("reward, first / last step", f"{steps[0].reward:.3f} / {steps[-1].reward:.3f}")
    table.add_row(
        "held-out reward, before / after",
        f"{report.held_out_before:.3f} / {report.held_out_after:.3f}",
    )
    table.add_row("gen_kl_error, worst step", f"{max(step.gen_kl_error for step in steps):.2e}")
    table.add_row(
        "token probability error, worst step",
        f"{max(step.token_prob_error for step in steps):.2e}",
    )
    table.add_row("refit, median", f"{_median([step.refit_s for step in steps]) * 1e3:.2f} ms")
    table.add_row("refit of the step time, worst step", f"{max(s.refit_share for s in steps):.3%}")
    table.add_row("bytes of a refit", f"{steps[-1].refit_bytes:,}")
    table.add_row("step time, median", f"{_median([step.step_s for step in steps]):.2f} s")
    return table


def plot(steps: Sequence[StepMetrics], path: Path) -> None:
    """Reward, trainer-engine disagreement and time by step, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(12, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    reward, error, times = figure.subplots(1, 3)
    numbers = [step.step for step in steps]

    reward.plot(numbers, [step.reward for step in steps], marker="o", markersize=3)
    reward.set(title="mean reward", xlabel="step", ylim=(0, 1.05))

    floor = 1e-12  # the estimator can be exactly zero, which a logarithmic axis cannot show
    error.semilogy(numbers, [max(step.gen_kl_error, floor) for step in steps], label="gen_kl_error")
    error.semilogy(numbers, [step.token_prob_error for step in steps], label="mean |Δp|")
    error.set(title="trainer against engine", xlabel="step")
    error.legend()

    times.stackplot(
        numbers,
        [step.train_s for step in steps],
        [step.rollout_s for step in steps],
        [step.refit_s for step in steps],
        labels=["train", "rollout", "refit"],
    )
    share = max(step.refit_share for step in steps)
    times.set(title=f"seconds a step (refit at most {share:.2%})", xlabel="step")
    times.legend(loc="lower left")
    for axes in (reward, error, times):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=120)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
