from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from shardmark.config.experiment import Experiment
from shardmark.config.load import (
    from_mapping,
    load_experiment,
    preset_names,
    presets,
    to_yaml,
)
from shardmark.core.errors import InputError
from shardmark.trials.matrix import expand

GOOD = """
name: test
workload: {name: toy}
recipe:
  global_batch: 64
  epochs: 2
  optimizer: {lr: 0.1, weight_decay: 5e-4}
matrix:
  strategy: [alone, both]
"""


def _message(source: str | Path) -> str:
    with pytest.raises(InputError) as caught:
        load_experiment(source)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "FILE: it is empty; allowed is a mapping"),
        ("# only this\n", "FILE: it is empty"),
        ("- 1", "FILE: found [1]; allowed is a mapping"),
        (b"\xff\xfe\x00\x01", "FILE: not UTF-8 text"),
        (b"#" * (2**20 + 1), "FILE: larger than 1 MiB"),
        ("name: a\nname: b", "FILE, line 2: the key 'name' is given twice"),
        (GOOD.replace("epochs", "epoch"), "FILE: recipe.epoch: no such key; allowed are"),
        (GOOD.replace("epochs", "epoch"), "(nearest: 'epochs')"),
        (GOOD.replace("matrix:", "matrxi:"), "FILE: matrix: missing; this key is required\n"),
        (GOOD.replace("matrix:", "matrxi:"), "FILE: matrxi: no such key; allowed are name, "),
        (GOOD.replace("both]", "bth]"), "FILE: matrix.strategy[1]: found 'bth'; allowed are"),
        (GOOD.replace("both]", "bth]"), "(nearest: 'both')"),
        (
            GOOD.replace("  epochs: 2\n", "") + "  steps: [ten]\n",
            "FILE: matrix.recipe.steps[0]: found 'ten'; allowed is a whole number",
        ),
    ],
)
def test_says_what_is_wrong_in_a_file(
    file_message: Callable[[str | bytes], str], content: str | bytes, expected: str
) -> None:
    assert expected in file_message(content)


def test_says_all_mistakes_at_once_in_one_order(
    file_message: Callable[[str | bytes], str],
) -> None:
    content = GOOD.replace("test", "a/b").replace("lr: 0.1", "lr: -1").replace("both", "bth")
    keys = [line.split(": ")[1] for line in file_message(content).splitlines()]
    assert keys == ["name", "recipe.optimizer.lr", "matrix.strategy[1]"]


def test_an_error_can_be_pickled() -> None:
    with pytest.raises(InputError) as caught:
        from_mapping({"nmae": 1})
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_missing_file_names_the_nearest_presets(tmp_path: Path) -> None:
    said = _message("quickstrat")
    assert "no such file, and no such preset" in said
    assert "(nearest: 'quickstart', " in said
    assert "no such file" in _message(tmp_path / "nothing.yaml")


def test_a_folder_is_not_an_experiment(tmp_path: Path) -> None:
    assert "it is a folder; allowed is a YAML file" in _message(tmp_path)
    (tmp_path / "experiment.yaml").touch()
    assert f"its experiment is {tmp_path / 'experiment.yaml'}" in _message(tmp_path)


@pytest.mark.parametrize("source", ["a\0b", "~no-such-user-here/x", "x" * 5000])
def test_an_impossible_path_is_said_so(source: str) -> None:
    assert "allowed is a YAML file" in _message(source)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.touch(mode=0)
    assert "cannot be read: Permission denied" in _message(path)


def test_data_that_are_no_mapping_are_said_so() -> None:
    with pytest.raises(InputError, match="experiment: found 3; allowed is a mapping"):
        from_mapping(3)


def test_what_is_written_loads_to_an_equal_experiment(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(GOOD + "  precision: [fp32, bf16]\n  workload.model: [large]\n")
    experiment = load_experiment(path)
    assert experiment.recipe.optimizer.weight_decay == 5e-4
    path.write_text(to_yaml(experiment))
    again = load_experiment(path)
    assert again == experiment
    assert to_yaml(again) == to_yaml(experiment)
    assert expand(again, "cpu") == expand(experiment, "cpu")


def test_a_folder_named_like_a_preset_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    assert "it is a folder" not in _message("quickstart")  # its strategies are not in these tables


def test_every_preset_says_what_it_is_for() -> None:
    assert tuple(presets()) == preset_names()
    assert {"quickstart", "cifar10-strategies", "asu-fsdp-2024"} <= set(preset_names())
    for purpose in presets().values():
        assert len(purpose) > 20


def test_python_sequences_will_do() -> None:
    experiment = from_mapping(
        {
            "name": "test",
            "workload": {"name": "toy"},
            "recipe": {"global_batch": 64},
            "matrix": {"strategy": ("both",), "steps": (10, 20)},
        }
    )
    assert isinstance(experiment, Experiment)
    assert experiment.matrix["recipe.steps"] == [10, 20]
