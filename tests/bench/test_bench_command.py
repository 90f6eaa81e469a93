"""The command of the bench: who may build one, and what it makes of its arguments."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from benchmarks.cluster import namespaces
from benchmarks.cluster.__main__ import filled, main
from benchmarks.cluster.bench import Node, bits_per_second

from shardmark.base.errors import InputError, ShardmarkError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("unlimited", None), ("10gbit", 1e10), ("200mbit/s", 2e8), ("1.5 Gbit", 1.5e9)],
)
def test_speeds_are_parsed(text: str, expected: float | None) -> None:
    assert bits_per_second(text) == expected
    for wrong in ("10", f"-{text}", "1bit", "200mb"):
        with pytest.raises(InputError, match="allowed: unlimited, or such as 10gbit"):
            bits_per_second(wrong)


def test_missing_rights_or_tools_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["run", "--", "true"]) == 2
    assert "can be built by root only" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ShardmarkError, match="no ip: install iproute2"):
        namespaces.check_root()


def test_words_in_braces_are_replaced() -> None:
    first = Node(number=0, namespace="n0", host="node0", address="10.99.0.1")
    second = Node(number=1, namespace="n1", host="node1", address="10.99.0.2")
    word = "{node}/{nodes} {host} {address} {master} {other}"
    assert filled(word, second, first, 2) == "1/2 node1 10.99.0.2 10.99.0.1 {other}"


def test_an_experiment_runs_once_for_each_speed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Trials that failed do not keep the next speed from being tried; bad input does."""
    ran: list[tuple[list[str], str]] = []
    codes = iter([1, 0, 2])

    def everywhere(words: list[str], _: object, speed: str) -> int:
        ran.append((words, speed))
        return next(codes)

    monkeypatch.setattr("benchmarks.cluster.__main__._everywhere", everywhere)
    given = ["experiment", "quickstart", "--out", str(tmp_path), "--set", "recipe.steps=3"]
    speeds = ["--speed", "unlimited", "--speed", "200mbit/s"]
    assert main([*given, *speeds]) == 1
    assert [speed for _, speed in ran] == ["unlimited", "200mbit/s"]
    words = ran[1][0]
    assert words[words.index("--out") + 1] == str(tmp_path / "200mbit-s")
    changes = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    assert changes == [
        *("engine.name=torchrun", "engine.rendezvous={master}:29400"),
        *("placement.nodes=2", "recipe.steps=3"),
    ]
    assert main([*given, *speeds]) == 2
    assert len(ran) == 3
    assert main([*given, "--speed", "1gbit", "--speed", "fast"]) == 2
    assert len(ran) == 3, "a wrong speed is found before the first run"


def test_an_experiment_may_vary_the_nodes_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The poster's experiment does: it is not told the number, and must find enough nodes."""
    ran: list[list[str]] = []

    def everywhere(words: list[str], *_: object) -> int:
        ran.append(words)
        return 0

    monkeypatch.setattr("benchmarks.cluster.__main__._everywhere", everywhere)
    given = ["experiment", "fsdp-vs-deepspeed-poster", "--out", str(tmp_path)]
    assert main(given) == 0
    assert not any("placement.nodes" in word for word in ran[0])
    assert main([*given, "--set", "matrix.nodes=[1, 4]"]) == 2
    assert "--nodes: 2, and trials take up to 4" in capsys.readouterr().err
    assert len(ran) == 1
